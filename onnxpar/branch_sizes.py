"""Sizes of inputs that one branch of an If alone reads: no other input needs to agree with them.

A run computes one of the branches. What the other one would read may be a dummy then, such as the
empty cache of a decoder's first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from onnx import GraphProto, NodeProto

from onnxpar.symbols import Polynomial

At = tuple[str, int]
"""A tensor's name and an axis of it."""
SizeOf = Callable[[str], list[Polynomial | None]]
"""The sizes of a tensor in closed form; None for those that have none or are not known."""


def free_sizes(graph: GraphProto, dims: Mapping[At, Polynomial], size_of: SizeOf) -> frozenset[At]:
    """The open sizes of inputs that only branches read which are not computed together, where no
    size of what the If makes is told by them."""
    others = {port.name for port in graph.output}
    ifs = [node for node in graph.node if _is_if(node)]
    for node in graph.node:
        others.update(node.input if _is_if(node) else _reads(node))
    told: dict[str, set[str]] = {}
    for node in ifs:
        each = [set(_reads_of(a.g)) for a in node.attribute if a.HasField("g")]
        others.update(set.intersection(*each))
        sizes = [size for name in node.output if name for size in size_of(name)]
        symbols = {str(v) for size in sizes if size is not None for v in size.variables}
        for name in set.union(*each):
            told.setdefault(name, set()).update(symbols)
    return frozenset(
        (name, axis)
        for (name, axis), size in dims.items()
        if name in told and name not in others and told[name].isdisjoint(size.variables)
    )


def _is_if(node: NodeProto) -> bool:
    return node.op_type == "If" and node.domain in ("", "ai.onnx")


def _reads(node: NodeProto) -> Iterator[str]:
    """All names that a node and its bodies read."""
    yield from node.input
    for attribute in node.attribute:
        for body in chain([attribute.g] if attribute.HasField("g") else [], attribute.graphs):
            yield from _reads_of(body)


def _reads_of(body: GraphProto) -> Iterator[str]:
    for node in body.node:
        yield from _reads(node)
    yield from (port.name for port in body.output)
