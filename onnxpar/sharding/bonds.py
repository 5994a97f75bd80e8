"""Finds bonded leaves: leaves of different nodes that must be split over the same axes or stay
whole, because onnxruntime fuses the nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

from onnxpar.sharding.factors import OpFactors

Member = tuple[int, int]
"""A leaf of a node: (index of the node, index of the leaf in the node)."""
Edge = tuple[Member, Member]
"""Producer and reader of a tensor: (node, result) and (node, operand), all indices."""


def edges_of(ops: Sequence[OpFactors], fused: Collection[str]) -> list[Edge]:
    """An edge from the producer of each fused tensor to each of its readers."""
    if not fused:
        return []
    producers = {t.name: (n, i) for n, op in enumerate(ops) for i, t in enumerate(op.node.outputs)}
    return [
        (producers[t.name], (n, i))
        for n, op in enumerate(ops)
        for i, t in enumerate(op.node.inputs)
        if t.name in fused and t.name in producers
    ]


def groups(ops: Sequence[OpFactors], edges: Sequence[Edge]) -> list[frozenset[Member]]:
    """Groups of leaves that are connected by chains of edges."""
    group_of: dict[Member, set[Member]] = {}
    for (m, o), (r, i) in edges:
        for a, b in zip(ops[m].outputs[o], ops[r].inputs[i], strict=True):
            if a is not None and b is not None:
                joined = group_of.get((m, a), {(m, a)}) | group_of.get((r, b), {(r, b)})
                group_of.update(dict.fromkeys(joined, joined))
    return [frozenset(g) for g in {id(g): g for g in group_of.values()}.values()]


def not_alike(ops: Sequence[OpFactors], edges: Sequence[Edge]) -> Mapping[int, set[int]]:
    """Leaves that must stay whole, by index of the node: the node at the other end of an edge
    cannot split the leaf, or a split would make the tensor between the nodes partial."""
    held: dict[int, set[int]] = defaultdict(set)
    for (m, o), (r, i) in edges:
        for a, b in zip(ops[m].outputs[o], ops[r].inputs[i], strict=True):
            if a is None and b is not None:
                held[r].add(b)
            if b is None and a is not None:
                held[m].add(a)
        held[m].update(_communicating(ops[m]))
        if i in ops[r].rule.additive:
            held[r].update(_communicating(ops[r]))
    for group in groups(ops, edges):
        for (n, a), (other, b) in combinations(group, 2):
            if n == other and (a, b) not in ops[n].apart:
                held[n] |= {a, b}
    return {n: leaves for n, leaves in held.items() if leaves}


def _communicating(op: OpFactors) -> Iterator[int]:
    """Yields leaves whose split needs communication within or after the node."""
    exchanged = {*op.rule.communicating, *(f for group in op.rule.co_sharded for f in group)}
    for i, leaf in enumerate(op.leaves):
        if op.reduction(i) or leaf.factor in exchanged:
            yield i
