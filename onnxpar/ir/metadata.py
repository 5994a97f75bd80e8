"""Metadata of the nodes of a graph, which models keep."""

from __future__ import annotations

import onnx_graphsurgeon as gs


def metadata_of(node: gs.Node, key: str) -> str | None:
    """Returns what a node's metadata say under a key; None if nothing."""
    source = vars(node).get("onnx_source")  # getattr would log a warning for a node without it
    entries = source.metadata_props if source is not None else ()
    return next((str(entry.value) for entry in entries if entry.key == key), None)
