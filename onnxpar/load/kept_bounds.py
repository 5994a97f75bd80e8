"""Keeps a Relu or Clip that onnxruntime would wrongly drop before it rounds to 2, 4 or 8 bits.

Before a QuantizeLinear with a zero point, onnxruntime leaves out a Relu, whose bound it takes for
that of the integers. It considers only integers of 8 and 16 bits: for signed integers of 2 and 4
bits and for 8-bit floats, negative values then stay. A Clip in that place stops it from loading the
model.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper

from onnxpar.graph.stored import nodes_of, stored_tensors
from onnxpar.graph.subgraphs import scopes
from onnxpar.graph.tensors import dtype_of, numpy_dtype

DROPPING = ("ReluQuantRewrite", "ClipQuantRewrite")
"""onnxruntime's optimizers that leave out bounds."""
_CONSIDERED = [TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16]


def drops_bounds(model: onnx.ModelProto) -> bool:
    """True if the model has a QuantizeLinear to a type for which onnxruntime would wrongly drop a
    bound."""
    nodes = list(nodes_of(model.graph))
    points = {name for n in nodes if n.op_type == "QuantizeLinear" for name in n.input[2:]}
    types = {t.name: t.data_type for t in stored_tensors(model.graph)}
    types |= {
        n.output[0]: a.t.data_type for n in nodes if n.op_type == "Constant" for a in n.attribute
    }
    return any(types.get(name, TensorProto.INT8) not in _CONSIDERED for name in points)


def keep_bounds(graph: gs.Graph) -> None:
    """Writes each Relu and Clip before such a QuantizeLinear as Max and Min, which onnxruntime
    keeps; in place, also in bodies."""
    for scope in scopes(graph):
        nodes: list[gs.Node] = []
        for node in scope.nodes:
            nodes += _kept(node) if _is_dropped(node) else [node]
        scope.nodes[:] = nodes


def _is_dropped(node: gs.Node) -> bool:
    """True for a Relu or Clip that onnxruntime would wrongly drop."""
    is_bound = node.op in ("Relu", "Clip") and not node.domain
    return is_bound and any(
        reader.op == "QuantizeLinear" and _stored(reader.outputs[0]) not in _CONSIDERED
        for reader in node.outputs[0].outputs
    )


def _stored(tensor: gs.Tensor) -> int:
    """Returns the ONNX data type of a tensor."""
    return helper.np_dtype_to_tensor_dtype(numpy_dtype(tensor))


def _kept(node: gs.Node) -> list[gs.Node]:
    """Returns the Max and the Min in place of a Relu or a Clip, which loses its operands and
    results."""
    x, *bounds = node.inputs
    if node.op == "Relu":
        bounds = [gs.Constant(f"{node.name}::bound", np.zeros((), dtype_of(x)))]
    steps = [(op, [b]) for op, b in zip(("Max", "Min"), bounds, strict=False) if b.name]
    nodes = []
    for op, others in steps or [("Identity", [])]:
        y = gs.Variable(f"{node.name}::{op}", x.dtype, x.shape)
        nodes.append(gs.Node(op, y.name, {}, [x, *others], [y]))
        x = y
    nodes[-1].outputs = list(node.outputs)
    node.inputs.clear()
    node.outputs.clear()
    return nodes
