"""Finds inputs that only one branch of an If reads, whose sizes therefore need not agree with those
of other inputs.

A run computes one of the two branches. Its caller may feed dummies to inputs that only the other
branch reads, such as an empty cache in a decoder's first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onnx import GraphProto, NodeProto

from onnxpar.graph.stored import captured_by, reads_of
from onnxpar.layout.symbols import Polynomial

At = tuple[str, int]
"""A tensor's name and an axis of it."""
SizeOf = Callable[[str], Sequence[Polynomial | None]]
"""Returns the closed forms of a tensor's sizes, by its name; None in place of an unknown size."""


def free_sizes(graph: GraphProto, dims: Mapping[At, Polynomial], size_of: SizeOf) -> frozenset[At]:
    """Returns the dimensions (input, axis) whose size a caller may choose freely: open dimensions
    in `dims` of inputs that only some branches of an If read, if no size of the If's results
    depends on their symbols."""
    others = {port.name for port in graph.output}
    ifs = [node for node in graph.node if _is_if(node)]
    for node in graph.node:
        others.update(node.input if _is_if(node) else reads_of(node))
    result_symbols: dict[str, set[str]] = {}
    for node in ifs:
        each = [captured_by(a.g) for a in node.attribute if a.HasField("g")]
        others.update(set.intersection(*each))
        sizes = [size for name in node.output if name for size in size_of(name)]
        symbols = {str(v) for size in sizes if size is not None for v in size.variables}
        for name in set.union(*each):
            result_symbols.setdefault(name, set()).update(symbols)
    return frozenset(
        (name, axis)
        for (name, axis), size in dims.items()
        if name in result_symbols
        and name not in others
        and result_symbols[name].isdisjoint(size.variables)
    )


def _is_if(node: NodeProto) -> bool:
    return node.op_type == "If" and node.domain in ("", "ai.onnx")
