"""Records the global node of each node of a rank's graph: in metadata, for nodes that lowering
creates. Other nodes have the name of the global node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from onnx import NodeProto

from onnxpar.graph.metadata import node_names, note_name_in_file

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

_KEY = "onnxpar.node"
_END = "\n"
"""Separates the names of several nodes."""


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
    """Records the name `origin` of the global node for which these nodes were created."""
    for node in nodes:
        if node.name != origin and vars(node).get("onnx_source") is None:
            node.onnx_source = NodeProto()
            node.onnx_source.metadata_props.add(key=_KEY, value=origin)


def note_origins(node: gs.Node, members: Iterable[gs.Node]) -> None:
    """Records that a node takes the place of `members`, with the global nodes of all of them."""
    origins: dict[str, None] = {}
    for member in members:
        origins |= dict.fromkeys(lowered_from(member))
    node.onnx_source = NodeProto()
    node.onnx_source.metadata_props.add(key=_KEY, value=_END.join(origins))


def lowered_from(node: gs.Node) -> list[str]:
    """The names of all global nodes that a node of the lowered graph was created for."""
    source = vars(node).get("onnx_source")
    return (_noted(source) if source is not None else []) or [node.name]


def origin_of(node: NodeProto) -> str:
    """The name of the global node that a rank's node was created for, or of the first one; by
    default the node's own name."""
    return origins_of(node)[0]


def origins_of(node: NodeProto) -> list[str]:
    """The names of all global nodes that a rank's node was created for."""
    return _noted(node) or [node.name]


def _noted(node: NodeProto) -> list[str]:
    return next((str(p.value).split(_END) for p in node.metadata_props if p.key == _KEY), [])


def copy_origin(nodes: Iterable[NodeProto], source: NodeProto) -> None:
    """Records that nodes of a rank's graph come from the global node from which `source` comes."""
    for node in nodes:
        if node.name != origin_of(source):
            node.metadata_props.add(key=_KEY, value=origin_of(source))
