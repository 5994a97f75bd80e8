"""Metadata of the nodes of a graph, which models keep."""

from __future__ import annotations

import onnx_graphsurgeon as gs
from onnx import NodeProto

_FILE_NAME = "onnxpar.name"


def note_file_name(node: NodeProto) -> None:
    """Records the name that a node has in its file, before it gets another one."""
    node.metadata_props.add(key=_FILE_NAME, value=node.name)


def has_file_name(node: NodeProto) -> bool:
    """True if `note_file_name` was called for a node."""
    return metadata_of(node, _FILE_NAME) is not None


def node_names(node: gs.Node) -> list[str]:
    """Returns a node's name, and the one that it has in its file if the loader gave it another."""
    name = metadata_of(node, _FILE_NAME)
    return [node.name, name] if name else [node.name]


def metadata_of(node: gs.Node | NodeProto, key: str) -> str | None:
    """Returns what a node's metadata say under a key; None if nothing."""
    # getattr would log a warning for a node of graphsurgeon without the attribute
    source = node if isinstance(node, NodeProto) else vars(node).get("onnx_source")
    entries = source.metadata_props if source is not None else ()
    return next((str(entry.value) for entry in entries if entry.key == key), None)
