"""Restores ops that the model's file had fused (FusedGemm, say) in the ranks' graphs, where no pass
has changed their parts.

The loader decomposes fused ops (`load/unfuse.py`), because a pass may have to insert a collective
between the parts. The names of tensors in a rank's graph show whether a pass did: model tensors
keep their names, and inserted or replaced nodes read and write tensors with other names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import GraphProto, NodeProto

from onnxpar.graph.stored import graphs_of
from onnxpar.load.unfuse import FusedNode

_OUTPUT = ""
"""Stands for the end of the graph among the readers of a tensor."""


@dataclass(frozen=True)
class _Group:
    """The parts of a fused op in a rank's graph, by names of tensors.

    node       the fused op, with the attributes and operands of the rank
    parts      the first result of each part
    inner      tensors between parts
    constants  operands of parts that are attributes of the fused op
    """

    node: NodeProto
    parts: frozenset[str]
    inner: frozenset[str]
    constants: frozenset[str]


def fuse_again(graph: GraphProto, fused: Sequence[FusedNode]) -> None:
    """Replaces the parts of fused nodes by the fused nodes, in place, also in subgraphs: only where
    all parts are connected as in the file, and no other node reads a tensor between them."""
    readers = _readers(graph)
    groups = [
        group
        for scope in (graphs_of(graph) if fused else ())
        for parts in [{n.output[0]: n for n in scope.node if n.output}]
        for node in fused
        if (group := _find(node, parts)) is not None
    ]
    while groups != (closed := _closed(groups, readers)):
        groups = closed
    for scope in reversed([*graphs_of(graph)] if groups else []):  # a copied node has its subgraphs
        _replace(scope, groups)


def _readers(graph: GraphProto) -> dict[str, set[str]]:
    """Returns the readers of each tensor, by name: the first result of each node that reads it, and
    _OUTPUT if it is a result of the graph."""
    readers: dict[str, set[str]] = {}
    for scope in graphs_of(graph):
        for node in scope.node:
            for name in node.input:
                readers.setdefault(name, set()).add(node.output[0] if node.output else _OUTPUT)
        for port in scope.output:
            readers.setdefault(port.name, set()).add(_OUTPUT)
    return readers


def _find(fused: FusedNode, nodes: Mapping[str, NodeProto]) -> _Group | None:
    """Returns the parts of a fused node among a graph's `nodes` (by first result); None if a part
    is missing or has changed."""
    operands = {"": ""}
    parts = [nodes.get(part.output[0]) for part in fused.parts]
    for number, (part, now) in enumerate(zip(fused.parts, parts, strict=True)):
        if now is None or not _is_same(part, now, number == fused.main):
            return None
        pairs = zip(part.input, now.input, strict=True)
        if any(operands.setdefault(before, after) != after for before, after in pairs):
            return None
    results = {name for part in fused.parts for name in part.output}
    inner = operands.keys() - set(fused.node.input)
    if any(operands[name] != name for name in inner) or not operands.keys() >= set(
        fused.node.input
    ):
        return None
    return _Group(
        _local(fused, parts[fused.main], operands),
        frozenset(part.output[0] for part in fused.parts),
        frozenset(results - set(fused.node.output)),
        frozenset(inner - results),
    )


def _is_same(part: NodeProto, now: NodeProto, is_main: bool) -> bool:
    """True if a rank's node `now` is this part of a fused node. The attributes of the main part may
    differ, as the fused node takes them over."""
    same = [part.op_type, part.domain, *part.output] == [now.op_type, now.domain, *now.output]
    return (
        same
        and len(part.input) == len(now.input)
        and (is_main or _attributes(part) == _attributes(now))
    )


def _attributes(node: NodeProto) -> dict[str, bytes]:
    return {a.name: a.SerializeToString(deterministic=True) for a in node.attribute}


def _local(fused: FusedNode, main: NodeProto | None, operands: Mapping[str, str]) -> NodeProto:
    """Returns the fused node of a rank: with the attributes of the rank's main part, and these
    operands, by name in the file."""
    assert main is not None
    node = NodeProto()
    node.CopyFrom(main)  # with its name: `PerRank` has attributes by node name
    node.op_type, node.domain = fused.node.op_type, fused.node.domain
    del node.input[:], node.output[:]
    node.input.extend(operands[name] for name in fused.node.input)
    node.output.extend(fused.node.output)
    shared = _attributes(fused.parts[fused.main])
    node.attribute.extend(a for a in fused.node.attribute if a.name not in shared)
    return node


def _closed(groups: Sequence[_Group], readers: Mapping[str, set[str]]) -> list[_Group]:
    """Returns the groups whose inner tensors are read only within groups; two groups may share a
    part."""
    inside: dict[str, set[str]] = {}
    for group in groups:
        for name in group.inner:
            inside.setdefault(name, set()).update(group.parts)
    return [g for g in groups if all(readers.get(n, set()) <= inside[n] for n in g.inner)]


def _replace(graph: GraphProto, groups: Sequence[_Group]) -> None:
    """Replaces each group's parts by the fused node, in the place of the last part, and drops the
    constants of the parts."""
    parts = {name for group in groups for name in group.parts}
    last = {group.node.output[0]: group.node for group in groups}
    nodes: list[NodeProto] = []
    for node in graph.node:
        first = node.output[0] if node.output else _OUTPUT
        if first in last:
            nodes.append(last[first])
        elif first not in parts:
            nodes.append(NodeProto.FromString(node.SerializeToString()))
    constants = {name for group in groups for name in group.constants}
    remaining = [tensor for tensor in graph.initializer if tensor.name not in constants]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(remaining)
