"""Fused ops of a file are put together again exactly where nothing came between their parts."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.parser
import pytest
from onnx import GraphProto, NodeProto, helper

from onnxpar.graph.stored import nodes_of
from onnxpar.load.unfuse import unfuse
from onnxpar.lowering.fuse_again import fuse_again

TEXT = """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
fused (float[4,6,5,5] x, float[8,6,3,3] w, float[8] b, float[4,8,3,3] z, float[4,6] u, bool c,
  float[6,8] v, uint8[6,8] k, float s, uint8 p) => (float[4,8,3,3] y, float[4,8] g, float[4,8] m) {
  y = com.microsoft.FusedConv<activation = "Relu", group = 1>(x, w, b, z)
  l = com.microsoft.FusedConv<activation = "Clip", activation_params = [-0.5, 1.5]>(x, w)
  g = If(c) <
    then_branch = body () => (float[4,8] t)
      { t = com.microsoft.FusedGemm<activation = "LeakyRelu", activation_alpha = 0.3>(u, v) },
    else_branch = other () => (float[4,8] e) { e = Gemm(u, v) }>
  n = com.microsoft.DynamicQuantizeMatMul(u, k, s, p)
  o = com.microsoft.DynamicQuantizeMatMul(u, k, s, "", b)
  m = Add(n, o)
}"""


def again(change: Callable[[GraphProto], None] = lambda graph: None) -> list[str]:
    """The ops of the graph whose fused ops are taken apart, changed, and put together again."""
    model = onnx.parser.parse_model(TEXT)
    fused = unfuse(model)
    change(model.graph)
    fuse_again(model.graph, fused)
    return [node.op_type for node in model.graph.node]


def made_by(graph: GraphProto, op: str) -> NodeProto:
    """The first node of an op."""
    return next(node for node in graph.node if node.op_type == op)


def test_graph_is_as_before() -> None:
    model, before = onnx.parser.parse_model(TEXT), onnx.parser.parse_model(TEXT)
    fused = unfuse(model)
    assert not [node for node in nodes_of(model.graph) if node.domain]
    fuse_again(model.graph, fused)
    for node in [*nodes_of(model.graph), *nodes_of(before.graph)]:
        node.ClearField("name")
        node.attribute.sort(key=lambda attribute: str(attribute.name))
    assert model == before


def read_twice(graph: GraphProto) -> None:
    graph.node.append(helper.make_node("Neg", [made_by(graph, "Conv").output[0]], ["other"]))


def return_inner(graph: GraphProto) -> None:
    name = made_by(graph, "Conv").output[0]
    graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))


def reduce_between(graph: GraphProto) -> None:
    node = made_by(graph, "Add")
    name, node.input[0] = node.input[0], "reduced"
    graph.node.append(helper.make_node("AllReduce", [name], ["reduced"], domain="onnxpar"))


def swap_activation(graph: GraphProto) -> None:
    made_by(graph, "Relu").op_type = "Abs"


@pytest.mark.parametrize("change", [read_twice, return_inner, reduce_between, swap_activation])
def test_first_convolution_stays_apart(change: Callable[[GraphProto], None]) -> None:
    ops = again(change)
    assert "Conv" in ops and ops.count("FusedConv") == 1


def test_products_that_share_a_quantization_stay_apart_together() -> None:
    def change(graph: GraphProto) -> None:
        made_by(graph, "Cast").attribute[0].i = onnx.TensorProto.DOUBLE

    ops = again(change)
    assert "DynamicQuantizeMatMul" not in ops
    assert ops.count("MatMulInteger") == 2 and ops.count("DynamicQuantizeLinear") == 1


def test_operands_and_attributes_are_those_of_the_parts() -> None:
    model = onnx.parser.parse_model(TEXT)
    fused = unfuse(model)
    node = made_by(model.graph, "Conv")
    node.name, node.input[0] = "own", "part"
    node.attribute.append(helper.make_attribute("pads", [1, 0, 1, 0]))
    made_by(model.graph, "Add").input[1] = "local"
    fuse_again(model.graph, fused)
    found = model.graph.node[0]
    values = {a.name: helper.get_attribute_value(a) for a in found.attribute}
    assert (found.name, found.op_type, [*found.input]) == (
        "own",
        "FusedConv",
        ["part", "w", "b", "local"],
    )
    assert values == {"group": 1, "pads": [1, 0, 1, 0], "activation": b"Relu"}


def test_clips_with_other_bounds_stay_apart() -> None:
    def change(graph: GraphProto) -> None:
        made_by(graph, "Clip").input[1] = "other"

    assert again(change).count("FusedConv") == 1
