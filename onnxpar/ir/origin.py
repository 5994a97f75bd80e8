"""Where the nodes of a rank's graph come from: what lowering makes names the global node, in its
metadata. Other nodes keep the name that they have in the global graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from onnx import NodeProto

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

_KEY = "onnxpar.node"


def note_origin(nodes: Iterable[gs.Node], origin: str) -> None:
    """Notes the global node that these are made for."""
    for node in nodes:
        if node.name != origin and vars(node).get("onnx_source") is None:
            node.onnx_source = NodeProto()
            node.onnx_source.metadata_props.add(key=_KEY, value=origin)


def origin_of(node: NodeProto) -> str:
    """The name of the global node that a rank's node is made for, or that it is itself."""
    return next((str(p.value) for p in node.metadata_props if p.key == _KEY), node.name)
