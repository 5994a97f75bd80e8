"""Replaces gated activations that onnxruntime has no kernel for by the ops that define them.

ONNX defines Swish (opset 24) and SwiGLU (opset 28) as functions. onnxruntime 1.32 runs Swish only
in opset 24, and SwiGLU not at all, since its body contains a Swish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnx.shape_inference
from onnx import NodeProto, helper, numpy_helper

from onnxpar.base.names import Names
from onnxpar.graph.checker import loads
from onnxpar.graph.stored import (
    copy_with_stubs,
    graphs_of,
    is_folded,
    nodes_of,
    onnx_opset,
    stored_tensors,
    subgraphs_of,
    without_data,
)
from onnxpar.graph.used_names import names_in


def spell_out(model: onnx.ModelProto) -> None:
    """Writes each Swish that onnxruntime does not run, and each SwiGLU, as Sigmoid and Mul, in
    place, also in subgraphs."""
    opset = onnx_opset(model)
    ops = {"SwiGLU"} | (set() if _runs_swish(opset) else {"Swish"})
    nodes = [n for n in nodes_of(model.graph) if _is_one_of(n, ops)]
    if nodes:
        scaled = any(_alpha(node) != 1.0 for node in nodes)
        _Spelling(ops, _types(model) if scaled else {}, names_in(model.graph)).spell(model.graph)


def _is_one_of(node: NodeProto, ops: set[str]) -> bool:
    return node.op_type in ops and node.domain in ("", "ai.onnx")


def _alpha(node: NodeProto) -> float:
    return next((a.f for a in node.attribute if a.name == "alpha"), 1.0)


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """The element types of tensors, by name."""
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


@dataclass(frozen=True)
class _Spelling:
    """Writes these ops of a graph as others; `types` has the element types of tensors by name."""

    ops: set[str]
    types: Mapping[str, int]
    names: Names

    def spell(self, graph: onnx.GraphProto) -> None:
        """Rewrites a graph and its subgraphs, in place."""
        written: list[NodeProto] = []
        for node in graph.node:
            for inner in subgraphs_of(node):
                self.spell(inner)
            written += self._spelled(node, graph) if _is_one_of(node, self.ops) else [node]
        if len(written) > len(graph.node):
            copies = [NodeProto.FromString(node.SerializeToString()) for node in written]
            del graph.node[:]
            graph.node.extend(copies)

    def _spelled(self, node: NodeProto, graph: onnx.GraphProto) -> list[NodeProto]:
        """`a * Sigmoid(alpha * a)`, times the second operand of a SwiGLU."""
        gate, alpha = node.input[0], _alpha(node)
        root = self.names.root(node.output[0], "::")
        at = f"{root}::{{}}".format
        nodes: list[NodeProto] = []
        scaled = gate
        if alpha != 1.0:
            scaled = at("scaled")
            kind = helper.tensor_dtype_to_np_dtype(self.types[gate])
            factor = numpy_helper.from_array(np.asarray(alpha, kind), at("alpha"))
            graph.initializer.append(factor)
            nodes.append(helper.make_node("Mul", [gate, factor.name], [scaled]))
        nodes.append(helper.make_node("Sigmoid", [scaled], [at("sigmoid")]))
        is_gated = node.op_type == "SwiGLU"
        swish = at("swish") if is_gated else node.output[0]
        nodes.append(helper.make_node("Mul", [gate, at("sigmoid")], [swish]))
        if is_gated:
            nodes.append(helper.make_node("Mul", [swish, node.input[1]], [node.output[0]]))
        own = node.name or f"{node.op_type}_{node.output[0]}"
        for number, each in enumerate(nodes[:-1]):
            each.name = f"{own}::{each.op_type}{number}"
        nodes[-1].name = own
        nodes[-1].metadata_props.extend(node.metadata_props)
        return nodes
