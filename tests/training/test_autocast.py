"""Losses in mixed precision, against those of PyTorch 2 under torch.autocast("cpu").

There, `made` below fills all tensors, and the loss is the mean square of the difference from
made(8, 4, by=0.3).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from training.steps import Array, quiet

from onnxpar.training import grad


def made(*shape: int, by: float = 1.0) -> Array:
    return np.sin(np.arange(1, np.prod(shape) + 1) * by).reshape(shape).astype(np.float32)


W1, W2 = made(4, 4, by=0.7), made(4, 4, by=1.3)
POSITIONS = """ids = Cast<to = 1>(i)  p = Unsqueeze(ids, last)  at = Mul(p, rates)
    c = Cos(at)  s = Sin(at)  e = Concat<axis = 1>(c, s)  y = MatMul(e, w1)"""
OUTER = """ids = Cast<to = 1>(i)  p = Unsqueeze(ids, last)  r = Unsqueeze(rates, first)
    at = MatMul(p, r)  c = Cos(at)  s = Sin(at)  e = Concat<axis = 1>(c, s)  y = MatMul(e, w1)"""
TIMES = """a = Add(x, thousand)  b = Sub(a, thousand)  c = Mul(b, three)  t = Tanh(c)
    y = MatMul(t, w1)"""
RESIDUAL = """a = Add(x, hundreds)  h = MatMul(a, w1)  r = Relu(h)  k = Mul(r, small)  s = Add(a, k)
    n = LayerNormalization(s, ones)  y = MatMul(n, w2)"""
OFFSET = "h = MatMul(x, w1)  a = Add(h, large)  b = Sub(a, large)  y = MatMul(b, w2)"
CURVES = """h = MatMul(x, w1)  a = Mul(h, four)  e = Exp(a)  t = ReduceSum(e, last)  l = Log(t)
    p = Softmax(h)  y = Mul(l, p)"""
CONSTANTS = """int64[1] first = {0}, int64[1] last = {1}, float[2] rates = {1, 0.1},
    float thousand = {1000}, float three = {3}, float hundreds = {300}, float small = {0.01},
    float four = {4}, float[4] ones = {1, 1, 1, 1}, float[4] large = {70000, 70000, 70000, 70000}"""
CASES = {
    "positions": (POSITIONS, 0.9685424, 0.9680724),
    "an outer product of positions": (OUTER, 0.9685424, 0.9680724),  # autocast is off around it
    "times": (TIMES, 1.3056598, 1.3044429),
    "a large residual": (RESIDUAL, 4.6762791, 4.6759329),
    "a number beyond float16": (OFFSET, 0.8595660, 0.8620706),
    "curves": (CURVES, 0.6284583, 0.6299751),
}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_losses(case: str, precision: str, tmp_path: Path) -> None:
    body, *losses = CASES[case]
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
        m (float[8,4] x, int64[8] i) => (float[8,4] y) <{CONSTANTS}> {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    stored = {"w1": W1, "w2": W2}
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in stored.items())
    onnx.save(model, tmp_path / "m.onnx")
    names = [name for name in stored if name in body]
    how = {"loss": "mse", "optimizer": "sgd", "params": names, "loss_scale": "none"}
    grad(tmp_path / "m.onnx", tmp_path / "step.onnx", precision=precision, **how)
    options = quiet()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # rounds all
    session = ort.InferenceSession(str(tmp_path / "step.onnx"), options)
    x, i = made(8, 4), np.arange(2000, 2008)
    known = {
        "x": x,
        "i": i,
        "target": made(8, 4, by=0.3),
        "learning_rate": np.array(0.1, np.float32),
    }
    feeds = {port.name: known[port.name] for port in session.get_inputs()}
    loss, *nexts = session.run(["loss", *(f"{name}.next" for name in names)], feeds)
    wanted = losses[precision == "float16"]
    np.testing.assert_allclose(loss, wanted, rtol=1e-3 if precision == "float16" else 4e-3)
    assert all(np.isfinite(after).all() for after in nexts)
