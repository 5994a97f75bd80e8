"""Marks, in nodes' metadata, which models keep: nodes through which no gradient flows back, and
rows of tables that get no gradient."""

from __future__ import annotations

import onnx_graphsurgeon as gs
from onnx import NodeProto

from onnxpar.graph.metadata import metadata_of

_STOP = "onnxpar.stop_gradient"
_ROW = "onnxpar.padding_row"


def mark_stop(node: gs.Node) -> None:
    """Marks an Identity node: no gradient flows back through it."""
    _mark(node, _STOP, "")


def is_stop(node: gs.Node) -> bool:
    """True if `mark_stop` has marked the node."""
    return node.op == "Identity" and metadata_of(node, _STOP) is not None


def marks_stop(node: NodeProto) -> bool:
    """True if a node of a file is marked: no gradient flows back through it, or none of some
    row."""
    return any(entry.key in (_STOP, _ROW) for entry in node.metadata_props)


def mark_padding(gather: gs.Node, row: int) -> None:
    """Marks a Gather from a table: this row of the table gets no gradient from it."""
    _mark(gather, _ROW, str(row))


def padding_row(gather: gs.Node) -> int | None:
    """Returns the row of a Gather's table that gets no gradient from it; None if there is none."""
    row = metadata_of(gather, _ROW)
    return None if row is None else int(row)


def _mark(node: gs.Node, key: str, value: str) -> None:
    source = NodeProto()
    if (before := vars(node).get("onnx_source")) is not None:
        source.CopyFrom(before)
    kept = [entry for entry in source.metadata_props if entry.key != key]
    del source.metadata_props[:]
    source.metadata_props.extend(kept)
    source.metadata_props.add(key=key, value=value)
    node.onnx_source = source
