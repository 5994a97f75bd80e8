"""Small models of which ranks compute all outputs, with ops and layouts that are rarely met."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

import onnxpar

MODELS = {
    "a constant that only a body reads": (
        """m (float[4,6] x, bool c) => (float[4,1,6] y)
        { two = Constant<value_ints = [0, 2]>()  one = Constant<value_ints = [1]>()
          axis = Sub(one, one)  h = Relu(x)
          y = If(c)<then_branch = a () => (float[4,1,6] s) { next = Add(axis, one)
                                                             s = Unsqueeze(h, next) },
                    else_branch = b () => (float[4,1,6] t) { n = Neg(h)
                                                             t = Unsqueeze(n, one) }> }""",
        {"mesh": {"tp": 2}, "tensors": {"x": ["tp", None]}},
    ),
    "branches with results of other sizes": (
        """m (float[4,6] x, bool c) => (float[p,6] y)
        { h = Relu(x)
          y = If(c)<then_branch = a () => (float[4,6] s) { s = Identity(h) },
                    else_branch = b () => (float[8,6] t) { t = Concat<axis = 0>(h, h) }> }""",
        {"mesh": {"tp": 2}, "tensors": {"x": [None, "tp"]}},
    ),
    "a branch that a constant chooses": (
        """m (float[4,6] x) => (float[4,6] y)
        { n = Size(x)  many = Constant<value_int = 24>()  c = Equal(n, many)  h = Relu(x)
          y = If(c)<then_branch = a () => (float[4,6] s) { s = Abs(h) },
                    else_branch = b () => (float[4,6] t) { t = Neg(h) }> }""",
        {"mesh": {"tp": 2}, "tensors": {"x": ["tp", None]}},
    ),
    "a number of the type of another tensor": (
        """m (float[4,6] x) => (float[4,9] y)
        { n = Constant<value_int = 2>()  h = Relu(x)  fill = CastLike(n, h)
          pads = Constant<value_ints = [0, 1, 0, 2]>()  y = Pad(h, pads, fill) }""",
        {"mesh": {"tp": 2}, "tensors": {"x": ["tp", None]}},
    ),
    "keys in parts": (
        """m (float[2,3,4,8] q, float[2,3,6,8] k, float[2,3,6,8] v) => (float[2,3,4,8] y)
        { y = Attention(q, k, v) }""",
        {"mesh": {"tp": 2}, "tensors": {"k": [None, None, "tp", None]}},
    ),
    "the largest of columns in parts": (
        """m (float[2,3] x) => (int64[2,1] y) { y = ArgMax<axis = 1>(x) }""",
        {"mesh": {"tp": 2}, "tensors": {"x": [None, "tp"]}},
    ),
    "one sample for two ranks": (
        """m (float[n,6] x, float[1,6] w) => (float[n,6] y) { h = Relu(w)  y = Add(x, h) }""",
        {"mesh": {"dp": 2}, "tensors": {"x": ["dp", None]}},
    ),
    "half numbers without a kernel": (
        """m (bfloat16[4,6] x) => (bfloat16[4,6] y) { h = Neg(x)  y = Softmax(h) }""",
        {"mesh": {"tp": 2}, "tensors": {"x": [None, "tp"]}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_right_ranks(name: str, tmp_path: Path) -> None:
    text, strategy = MODELS[name]
    model = tmp_path / "model.onnx"
    opset = f'<ir_version: 10, opset_import: ["": {23 if "Attention" in text else 21}]>'
    onnx.save(parser.parse_model(f"{opset} {text}"), model)
    onnxpar.shard(model, tmp_path / "model.par", strategy=strategy)
    result = onnxpar.verify(model, tmp_path / "model.par")
    assert result.ok, result.text()
