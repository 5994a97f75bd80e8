"""Ops without a gradient are errors where a gradient would have to pass."""

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from onnxpar.base.errors import ModelError
from onnxpar.training.gradients.reverse import gradients
from onnxpar.training.gradients.value import Builder

HEAD = """<ir_version: 10, opset_import: ["": 20]>
g (float[4] x, float s, uint8 z, int64 i) => (float[4] y)"""
ROUNDED = "{ q = QuantizeLinear (x, s, z)  y = DequantizeLinear (q, s, z) }"
LISTED = "{ a = Neg (x)  l = SequenceConstruct (a, x)  y = SequenceAt (l, i) }"
COUNTED = "{ q = QuantizeLinear (x, s, z)  c = Cast <to = 1> (q)  y = Mul (c, x) }"
UNRELATED = "{ q = QuantizeLinear (s, s, z)  d = DequantizeLinear (q, s, z)  y = Mul (x, d) }"


def gradient(text):
    """That of x."""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + text))
    graph = gs.import_onnx(model)
    for i, node in enumerate(graph.nodes):
        node.name = f"n{i}"
    seed = Builder(graph, "seed").constant(np.ones(4), np.float32)
    return gradients(graph, {"y": seed}, [graph.tensors()["x"]])["x"]


@pytest.mark.parametrize(
    "text, op", [(ROUNDED, "DequantizeLinear"), (LISTED, "SequenceAt"), (COUNTED, "QuantizeLinear")]
)
def test_an_op_without_a_gradient_on_the_way(text, op):
    with pytest.raises(ModelError, match=f"{op} 'n.' has no gradient"):
        gradient(text)


def test_an_op_without_a_gradient_off_the_way():
    assert gradient(UNRELATED) is not None
