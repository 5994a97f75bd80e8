"""Replaces gated activations for which onnxruntime has no kernel by the ops that define them.

ONNX defines Swish (opset 24) and SwiGLU (opset 28) as functions. onnxruntime 1.32 runs Swish only
in opset 24, and SwiGLU not at all, since its body contains a Swish.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnx.shape_inference
from onnx import helper

from onnxpar.graph.checker import loads
from onnxpar.graph.patterns import Match, Op, attributes, rewrite
from onnxpar.graph.stored import (
    copy_with_stubs,
    graphs_of,
    is_folded,
    onnx_opset,
    stored_tensors,
    without_data,
)


def spell_out(model: onnx.ModelProto) -> None:
    """Writes each Swish that onnxruntime does not run, and each SwiGLU, as Sigmoid and Mul, in
    place, also in subgraphs."""
    types = cache(lambda: _types(model))

    def swish(at: Match) -> None:
        """Writes x * Sigmoid(alpha * x), times the second operand of a SwiGLU."""
        gate, alpha = at["x"], attributes(at.node).get("alpha", 1.0)
        scaled = gate
        if alpha != 1.0:
            kind = helper.tensor_dtype_to_np_dtype(types()[gate])
            factor = at.constant(np.asarray(alpha, kind), "alpha")
            scaled = at.add("Mul", [gate, factor], "scaled")
        y = at.add("Mul", [gate, at.add("Sigmoid", [scaled], "sigmoid")], "swish")
        if at.operand(1):
            at.add("Mul", [y, at.operand(1)])

    ops = ("SwiGLU",) if _runs_swish(onnx_opset(model)) else ("SwiGLU", "Swish")
    rewrite(model.graph, {Op(ops, "x"): swish})


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """Returns the ONNX data types of tensors, by name, as far as ONNX infers them."""
    bare = copy_with_stubs(model, lambda t: None if is_folded(t) else without_data(t))
    graphs = graphs_of(onnx.shape_inference.infer_shapes(bare).graph)
    return {
        port.name: port.type.tensor_type.elem_type
        for graph in graphs
        for port in (*graph.value_info, *graph.input, *graph.output)
    } | {tensor.name: tensor.data_type for tensor in stored_tensors(model.graph)}


@cache
def _runs_swish(opset: int) -> bool:
    """True if the installed onnxruntime runs Swish in this opset."""
    return loads(helper.make_node("Swish", ["x"], ["y"]), opset)
