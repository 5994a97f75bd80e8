"""Checks known indices against the size of the table in which a node looks them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnx import NodeProto

from onnxpar.base.arrays import Array

_MICROSOFT = "com.microsoft"
_TABLES: Mapping[tuple[str, str], tuple[int, int, str]] = {
    ("", "Gather"): (0, 1, "axis"),
    ("", "GatherElements"): (0, 1, "axis"),
    ("", "RotaryEmbedding"): (1, 3, ""),
    (_MICROSOFT, "GatherBlockQuantized"): (0, 1, "gather_axis"),
    (_MICROSOFT, "RotaryEmbedding"): (2, 1, ""),
}
"""Ops that look up rows: position of the table and of the indices among the operands, and the
attribute with the table's axis (empty: the first axis)."""


_OF_ELEMENTS = frozenset(("GatherElements", "Scatter", "ScatterElements"))
"""Ops with an index for each element; along other axes than theirs, the indices must not be longer
than the data."""
Sizes = Callable[[str], tuple[int | None, ...] | None]


def reads_beyond(node: NodeProto, values: Mapping[str, Array], sizes: Sizes) -> bool:
    """True if a node certainly looks up an index outside its table, as far as values and sizes of
    tensors are known."""
    if node.op_type in _OF_ELEMENTS and _has_too_many(node, sizes):
        return True
    domain = "" if node.domain == "ai.onnx" else node.domain
    place = _TABLES.get((domain, node.op_type))
    if place is None or len(node.input) <= max(place[:2]):
        return False
    table, indices = sizes(node.input[place[0]]), values.get(node.input[place[1]])
    axis = next((a.i for a in node.attribute if a.name == place[2]), 0)
    if indices is None or not indices.size or not table or not -len(table) <= axis < len(table):
        return False
    rows, length = table[axis], _positions(node, indices, sizes)
    return rows is not None and not (-rows <= indices.min() and indices.max() + length <= rows)


def _has_too_many(node: NodeProto, sizes: Sizes) -> bool:
    data, indices = sizes(node.input[0]), sizes(node.input[1])
    if not data or not indices or len(data) != len(indices):
        return False
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0) % len(data)
    pairs = [pair for i, pair in enumerate(zip(data, indices, strict=True)) if i != axis]
    return any(a is not None and b is not None and a < b for a, b in pairs)


def _positions(node: NodeProto, indices: Array, sizes: Sizes) -> int:
    """Returns how many rows each index stands for: a whole sequence, if the index is the position
    of its first token; else 1."""
    shape = sizes(node.input[0]) or ()
    is_first = node.op_type == "RotaryEmbedding" and indices.size == 1 and len(shape) in (3, 4)
    return (shape[len(shape) - 2] if is_first else 1) or 1
