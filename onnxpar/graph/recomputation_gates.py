"""Gates: Identity nodes that delay the recomputation of activations until a gradient is there.

A gate consists of one Identity on the gradient, and one on each tensor that waits for it. They
carry the gate's name as metadata, which also files keep.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs
from onnx import NodeProto

from onnxpar.graph.metadata import metadata_of

_KEY = "onnxpar.gate"


def add_gate(graph: gs.Graph, gate: str, name: str, tensor: gs.Tensor) -> gs.Variable:
    """Appends an Identity node `name` of `tensor` to the graph and makes it part of the gate
    `gate`; returns its result."""
    result = gs.Variable(name, tensor.dtype, tensor.shape)
    node = gs.Node("Identity", name, {}, [tensor], [result])
    source = NodeProto()
    source.metadata_props.add(key=_KEY, value=gate)
    node.onnx_source = source
    graph.nodes.append(node)
    return result


def gate_of(node: gs.Node) -> str | None:
    """Returns the name of the gate to which a node belongs; None if it belongs to none."""
    return metadata_of(node, _KEY) if node.op == "Identity" else None
