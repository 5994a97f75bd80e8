"""The integers that an input may hold, from what its readers do with them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from onnxpar.interchange import default_of
from onnxpar.lookup import Lookup

_SAME_ELEMENTS = frozenset(
    ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Identity", "Expand", "Cast")
)
_FOLLOW = frozenset(
    (
        *_SAME_ELEMENTS,
        "Concat",
        "Slice",
        "Split",
    )
)
_MASK = (0, 2)
"""A mask: what is cast to floating point or bool, compared, or multiplied."""


def integer_ranges(graph: gs.Graph) -> dict[str, tuple[int, int]]:
    """[low, high) for each integer input: rows of the tables it indexes, else a mask's 0 and 1."""
    return {
        tensor.name: _range(tensor, set()) or _MASK
        for tensor in graph.inputs
        if tensor.dtype is not None and "int" in str(tensor.dtype)
    }


def lookups(graph: gs.Graph, is_open: bool) -> list[Lookup]:
    """The inputs all elements of which are looked up in a table. Where sizes are open, only stored
    tables are known to keep theirs."""
    return [
        Lookup(tensor.name, node.name, node.inputs[0].name, rows)
        for tensor in graph.inputs
        if tensor.dtype is not None and "int" in str(tensor.dtype)
        for node, rows in _tables(tensor, set())
        if not is_open or _is_stored(node.inputs[0])
    ]


def _tables(tensor: gs.Tensor, seen: set[str]) -> Iterator[tuple[gs.Node, int]]:
    seen.add(tensor.name)
    for node in tensor.outputs:
        position = next(i for i, t in enumerate(node.inputs) if t is tensor)
        limit = _limit(node, position)
        if limit is not None and node.op in ("Gather", "GatherElements"):
            yield node, limit
        elif node.op in _SAME_ELEMENTS and position == 0:
            result = node.outputs[0]
            if result.name not in seen and "float" not in str(result.dtype):
                yield from _tables(result, seen)


def _is_stored(table: gs.Tensor) -> bool:
    return isinstance(table, gs.Constant) or default_of(table) is not None


def _range(tensor: gs.Tensor, seen: set[str]) -> tuple[int, int] | None:
    """The smallest range that all indexing readers allow; None where nothing indexes with it."""
    seen.add(tensor.name)
    found: list[tuple[int, int]] = []
    for node in tensor.outputs:
        position = next(i for i, t in enumerate(node.inputs) if t is tensor)
        limit = _limit(node, position)
        if limit is not None:
            found.append((0, limit))
        elif (node.op in _FOLLOW and position == 0) or node.op == "Concat":
            for result in node.outputs:
                if result.name not in seen and "float" not in str(result.dtype):
                    inner = _range(result, seen)
                    found += [inner] if inner else []
    return min(found, key=lambda r: r[1], default=None)


def _limit(node: gs.Node, position: int) -> int | None:
    """Rows of the table that a node looks the operand up in, or classes that a loss knows."""
    if node.op in ("Gather", "GatherElements") and position == 1:
        data = node.inputs[0].shape
        size = data[node.attrs.get("axis", 0)] if data else None
        return int(size) if isinstance(size, int) else None
    if node.op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and position == 1:
        size = node.inputs[0].shape[1] if node.inputs[0].shape else None
        return int(size) if isinstance(size, int) else None
    return None
