"""The node of the global graph from which each node of a rank's graph comes. Nodes that lowering
creates have its name as metadata; other nodes are called as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from onnx import NodeProto

from onnxpar.graph.metadata import node_names, note_name_in_file

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

_KEY = "onnxpar.node"
_END = "\n"
"""Separates the names of several nodes in the metadata."""


def note_origin_of(nodes: Iterable[gs.Node], source: gs.Node) -> None:
    """Records the global node `source` for which these nodes were created, and its name in the file
    if the loader renamed it."""
    created = list(nodes)
    note_origin(created, source.name)
    *_, in_file = node_names(source)
    for node in created:
        if in_file != source.name:
            if vars(node).get("onnx_source") is None:
                node.onnx_source = NodeProto()
            note_name_in_file(node.onnx_source, in_file)


def note_origin(nodes: Iterable[gs.Node], origin: str) -> None:
    """Records that these nodes were created for the global node called `origin`."""
    for node in nodes:
        if node.name != origin and vars(node).get("onnx_source") is None:
            node.onnx_source = NodeProto()
            node.onnx_source.metadata_props.add(key=_KEY, value=origin)


def note_origins(node: gs.Node, members: Iterable[gs.Node]) -> None:
    """Records that a node replaces `members`, and so comes from the global nodes of all of them."""
    origins: dict[str, None] = {}
    for member in members:
        origins |= dict.fromkeys(lowered_from(member))
    node.onnx_source = NodeProto()
    node.onnx_source.metadata_props.add(key=_KEY, value=_END.join(origins))


def lowered_from(node: gs.Node) -> list[str]:
    """Returns the names of all global nodes from which a node of the lowered graph comes; its own
    name by default."""
    source = vars(node).get("onnx_source")
    return (_noted(source) if source is not None else []) or [node.name]


def origin_of(node: NodeProto) -> str:
    """Returns the name of the global node, or of the first one, from which a rank's node comes; its
    own name by default."""
    return origins_of(node)[0]


def origins_of(node: NodeProto) -> list[str]:
    """Returns the names of all global nodes from which a rank's node comes; its own name by
    default."""
    return _noted(node) or [node.name]


def _noted(node: NodeProto) -> list[str]:
    return next((str(p.value).split(_END) for p in node.metadata_props if p.key == _KEY), [])


def copy_origin(nodes: Iterable[NodeProto], source: NodeProto) -> None:
    """Records that nodes of a rank's graph come from the same global node as `source`."""
    for node in nodes:
        if node.name != origin_of(source):
            node.metadata_props.add(key=_KEY, value=origin_of(source))
