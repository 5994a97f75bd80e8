"""Records which global node each node of a rank's graph comes from: in metadata for nodes that
lowering creates. Other nodes have the name of the global node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from onnx import NodeProto

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

_KEY = "onnxpar.node"


def note_origin(nodes: Iterable[gs.Node], origin: str) -> None:
    """Records the global node for which these nodes were created."""
    for node in nodes:
        if node.name != origin and vars(node).get("onnx_source") is None:
            node.onnx_source = NodeProto()
            node.onnx_source.metadata_props.add(key=_KEY, value=origin)


def origin_of(node: NodeProto) -> str:
    """The name of the global node that a rank's node was created for; by default the node's own
    name."""
    return next((str(p.value) for p in node.metadata_props if p.key == _KEY), node.name)
