"""Steps that compute only the rows of activations that the loss reads."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
import pytest
from training.steps import check_training, run_unsplit, write_step

HEAD = "text (float[4,8,6] x, float[6,6] w1, float[6] w2, float[6,5] w3) => (float[4,5] y)"
LAYER = "h = MatMul(x, w1)  t = Tanh(h)  r = Add(t, w2)"
LAST = "f = Gather<axis = 1>(r, at)  y = MatMul(f, w3)"
SUMMED = "g = ReduceSum<keepdims = 0>(f, one)  y = MatMul(g, w3)"
ATTENTION = """text (float[4,8,6] x, float[6,8] wa, float[8,6] wb, float[6,6] w1, float[6,6] w2,
float[6,6] w4, float[6,6] w5, float[6] w6, float[6] w7, float[6,5] w8) => (float[4,5] y)
<int64[4] cut = {4, 8, 2, 3}, int64[3] joined = {0, -1, 6}, int64 at = {0}>
{ e = MatMul(x, wa)  v = Relu(e)  m = MatMul(v, wb)  a = MatMul(m, w1)
  q = Reshape(a, cut)  q4 = Transpose<perm = [0, 2, 1, 3]>(q)
  c = MatMul(m, w2)  k = Reshape(c, cut)  k4 = Transpose<perm = [0, 2, 3, 1]>(k)
  d = MatMul(m, w4)  u = Reshape(d, cut)  u4 = Transpose<perm = [0, 2, 1, 3]>(u)
  s = MatMul(q4, k4)  p = Softmax(s)  o4 = MatMul(p, u4)
  o = Transpose<perm = [0, 2, 1, 3]>(o4)  j = Reshape(o, joined)  h = MatMul(j, w5)
  r = Add(a, h)  n = LayerNormalization(r, w6, w7)  g = Tanh(n)
  f = Gather<axis = 1>(g, at)  y = MatMul(f, w8) }"""
CASES = {
    "attention": (
        ATTENTION,
        {
            "a": (4, 1, 6),
            "c": (4, 8, 6),
            "s": (4, 2, 1, 8),
            "h": (4, 1, 6),
            "n": (4, 1, 6),
            "m": (4, 8, 6),
        },
    ),
    "last": (f"{HEAD} <int64 at = {{-1}}> {{ {LAYER} {LAST} }}", {"h": (4, 1, 6), "r": (4, 1, 6)}),
    "some, twice and unordered": (
        f"{HEAD} <int64[4] at = {{5, 1, -3, 2}}, int64[1] one = {{1}}>"
        f" {{ {LAYER} f = Gather<axis = 1>(r, at) {SUMMED} }}",
        {"h": (4, 3, 6)},
    ),
    "a slice backwards": (
        f"{HEAD} <int64[1] a = {{-2}}, int64[1] b = {{-99}}, int64[1] one = {{1}}, int64[1] by = "
        f"{{-3}}, float[1,3,1] c = {{1, 2, 3}}>"
        f" {{ {LAYER} e = Slice(r, a, b, one, by) f = Mul(e, c) {SUMMED} }}",
        {"h": (4, 3, 6), "f": (4, 3, 6)},
    ),
    "a sum with itself": (
        f"{HEAD} <int64 at = {{0}}> {{ {LAYER.replace('r =', 'm =')} q = Mul(m, m) r = Sub(q, t)"
        f" {LAST} }}",
        {"h": (4, 1, 6), "m": (4, 1, 6)},
    ),
    "readers of two rows": (
        f"{HEAD} <int64 at = {{0}}, int64 two = {{1}}> {{ {LAYER} d = Gather<axis = 1>(r, at)"
        " e = Gather<axis = 1>(r, two) g = Add(d, e) y = MatMul(g, w3) }",
        {"h": (4, 8, 6)},
    ),
    "all rows in each": (
        f"{HEAD} <int64 at = {{0}}> {{ {LAYER.replace('r =', 'm =')} r = Softmax<axis = 1>(m)"
        f" {LAST} }}",
        {"h": (4, 8, 6), "r": (4, 8, 6)},
    ),
    "most rows": (
        f"{HEAD} <int64[5] at = {{0, 1, 2, 3, 4}}, int64[1] one = {{1}}>"
        f" {{ {LAYER} f = Gather<axis = 1>(r, at) {SUMMED} }}",
        {"h": (4, 8, 6)},
    ),
    "columns of a weight": (
        "text (float[4,8,6] x, float[6,6] w1, float[2,5] w3) => (float[4,8,5] y)"
        " <int64[2] at = {4, 1}> { h = MatMul(x, w1)  t = Tanh(h)  f = Gather<axis = 2>(t, at)"
        "  y = MatMul(f, w3) }",
        {"h": (4, 8, 6), "t": (4, 8, 2)},
    ),
    "noise": (
        f"{HEAD} <int64 at = {{0}}, float half = {{0.5}}, bool yes = {{1}}>"
        f" {{ {LAYER.replace('r =', 'm =')} r = Dropout(m, half, yes) {LAST} }}",
        {},
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_the_same_gradients(case: str, tmp_path: Path) -> None:
    text, shapes = CASES[case]
    (tmp_path / "all").mkdir()
    step = write_step(text, tmp_path, optimizer="none")
    with patch("onnxpar.training.backward.drop_unread_rows"):
        whole = write_step(text, tmp_path / "all", optimizer="none")
    draw = np.random.default_rng(7)
    labels = (4, 8) if case == "columns of a weight" else (4,)
    feeds = {
        "x": draw.standard_normal((4, 8, 6), np.float32),
        "labels": draw.integers(0, 5, labels),
        **({"seed": np.array(3)} if case == "noise" else {}),
    }
    (got,), (want,) = (run_unsplit(path, [feeds], [0.0])[0] for path in (step, whole))
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-6, atol=2e-7, err_msg=name)
    found = onnx.shape_inference.infer_shapes(onnx.load(step)).graph.value_info
    sizes = {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in found}
    assert {name: sizes[name] for name in shapes} == shapes


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout", ["data-parallel 2", "tensor-parallel 2", "sequence-parallel 2", "hybrid dp=2,tp=2"]
)
def test_ranks_agree_with_one(layout: str, tmp_path: Path) -> None:
    check_training(write_step(ATTENTION, tmp_path), layout, 3)
