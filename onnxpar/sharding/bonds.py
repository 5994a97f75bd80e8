"""Finds bonded leaves: leaves of different nodes that must be split over the same axes or stay
whole, because onnxruntime fuses the nodes and no reshard may come between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

from onnxpar.sharding.factors import OpFactors

Member = tuple[int, int]
"""A leaf of a node: (index of the node, index of the leaf in the node)."""
Edge = tuple[Member, Member]
"""A tensor as (producer, reader): ((node, result), (node, operand)), all indices."""


def edges_of(ops: Sequence[OpFactors], fused: Collection[str]) -> list[Edge]:
    """Returns an edge from the producer of each tensor named in `fused` to each of its readers."""
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
    """Returns the groups of bonded leaves (parts of dimensions): leaves that the tensors of `edges`
    connect, directly or through other nodes."""
    group_of: dict[Member, set[Member]] = {}
    for (m, o), (r, i) in edges:
        for a, b in zip(ops[m].outputs[o], ops[r].inputs[i], strict=True):
            if a is not None and b is not None:
                joined = group_of.get((m, a), {(m, a)}) | group_of.get((r, b), {(r, b)})
                group_of.update(dict.fromkeys(joined, joined))
    return [frozenset(g) for g in {id(g): g for g in group_of.values()}.values()]


def not_alike(ops: Sequence[OpFactors], edges: Sequence[Edge]) -> Mapping[int, set[int]]:
    """Returns the leaves (parts of dimensions) that must stay whole, by index of the node, because
    the two nodes of an edge cannot split them over the same axes without communication between the
    nodes.

    Such a leaf has no counterpart at the other end of its edge, or a split of it would make the
    tensor between the nodes partial, or two leaves of one node would need the same axes.
    """
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
    """Yields the leaves (parts of dimensions) whose split makes ranks communicate within the node
    or after it."""
    exchanged = {*op.rule.communicating, *(f for group in op.rule.co_sharded for f in group)}
    for i, leaf in enumerate(op.leaves):
        if op.reduction(i) or leaf.factor in exchanged:
            yield i
