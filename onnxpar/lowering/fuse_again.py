"""Puts the fused ops of a model's file into the ranks' graphs, where nothing came between their
parts.

The loader takes such ops apart (`load/unfuse.py`), because a collective may have to come
between. Whether one did, or whether a split replaced a part, is seen in the ranks' graph itself:
tensors keep their names, and what a pass inserts or replaces reads and writes others.
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
    """The parts of a fused op, by their first results, in a rank's graph.

    node       the fused op, with the attributes and operands of a rank
    inner      tensors between parts
    constants  operands of parts that are attributes of the fused op
    """

    node: NodeProto
    parts: frozenset[str]
    inner: frozenset[str]
    constants: frozenset[str]


def fuse_again(graph: GraphProto, fused: Sequence[FusedNode]) -> None:
    """Replaces the parts of fused nodes by these nodes, in place, also in subgraphs, where all
    parts are joined as in the file, and nothing else reads a tensor between them."""
    readers = _readers(graph)
    groups = [
        group
        for scope in (graphs_of(graph) if fused else ())
        for parts in [{n.output[0]: n for n in scope.node if n.output}]
        for each in fused
        if (group := _find(each, parts)) is not None
    ]
    while groups != (closed := _closed(groups, readers)):
        groups = closed
    for scope in reversed([*graphs_of(graph)] if groups else []):  # a copied node has its subgraphs
        _replace(scope, groups)


def _readers(graph: GraphProto) -> dict[str, set[str]]:
    """By tensor, the first results of the nodes that read it, and _OUTPUT if it is a result."""
    readers: dict[str, set[str]] = {}
    for scope in graphs_of(graph):
        for node in scope.node:
            for name in node.input:
                readers.setdefault(name, set()).add(node.output[0] if node.output else _OUTPUT)
        for port in scope.output:
            readers.setdefault(port.name, set()).add(_OUTPUT)
    return readers


def _find(fused: FusedNode, made: Mapping[str, NodeProto]) -> _Group | None:
    """The group of a fused node in a graph whose nodes `made` has by their first results; None if a
    part is missing or has changed."""
    operands = {"": ""}
    found = [made.get(part.output[0]) for part in fused.parts]
    for number, (part, now) in enumerate(zip(fused.parts, found, strict=True)):
        if now is None or not _is_same(part, now, number == fused.main):
            return None
        pairs = zip(part.input, now.input, strict=True)
        if any(operands.setdefault(before, after) != after for before, after in pairs):
            return None
    results = {name for part in fused.parts for name in part.output}
    own = operands.keys() - set(fused.node.input)
    if any(operands[name] != name for name in own) or not operands.keys() >= set(fused.node.input):
        return None
    return _Group(
        _local(fused, found[fused.main], operands),
        frozenset(part.output[0] for part in fused.parts),
        frozenset(results - set(fused.node.output)),
        frozenset(own - results),
    )


def _is_same(part: NodeProto, now: NodeProto, is_main: bool) -> bool:
    """True if a node of a rank is this part of a fused node. The attributes of the main part may
    differ, since the fused node has them too."""
    same = [part.op_type, part.domain, *part.output] == [now.op_type, now.domain, *now.output]
    return (
        same
        and len(part.input) == len(now.input)
        and (is_main or _attributes(part) == _attributes(now))
    )


def _attributes(node: NodeProto) -> dict[str, bytes]:
    return {a.name: a.SerializeToString(deterministic=True) for a in node.attribute}


def _local(fused: FusedNode, main: NodeProto | None, operands: Mapping[str, str]) -> NodeProto:
    """The fused node with the attributes that its main part has on a rank, and these operands."""
    assert main is not None
    node = NodeProto()
    node.CopyFrom(main)  # its name too, by which attributes that differ between ranks are found
    node.op_type, node.domain = fused.node.op_type, fused.node.domain
    del node.input[:], node.output[:]
    node.input.extend(operands[name] for name in fused.node.input)
    node.output.extend(fused.node.output)
    shared = _attributes(fused.parts[fused.main])
    node.attribute.extend(a for a in fused.node.attribute if a.name not in shared)
    return node


def _closed(groups: Sequence[_Group], readers: Mapping[str, set[str]]) -> list[_Group]:
    """The groups whose inner tensors are read only by parts of groups that have them inside."""
    inside: dict[str, set[str]] = {}
    for group in groups:
        for name in group.inner:
            inside.setdefault(name, set()).update(group.parts)
    return [g for g in groups if all(readers.get(n, set()) <= inside[n] for n in g.inner)]


def _replace(graph: GraphProto, groups: Sequence[_Group]) -> None:
    """Replaces the parts of the groups in a graph, each group where its last part was, and drops
    their constants."""
    parts = {name for group in groups for name in group.parts}
    last = {group.node.output[0]: group.node for group in groups}
    made: list[NodeProto] = []
    for node in graph.node:
        first = node.output[0] if node.output else _OUTPUT
        if first in last:
            made.append(last[first])
        elif first not in parts:
            made.append(NodeProto.FromString(node.SerializeToString()))
    constants = {name for group in groups for name in group.constants}
    kept = [tensor for tensor in graph.initializer if tensor.name not in constants]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(made)
    graph.initializer.extend(kept)
