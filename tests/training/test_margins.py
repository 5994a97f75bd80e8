"""Margin softmax losses against PyTorch, and their steps over split classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from training.steps import run_unsplit

from onnxpar.base.errors import StrategyError
from onnxpar.training import grad

NUMBERS = json.loads(Path(__file__).with_name("margins.json").read_text())
"""Written by margins_in_torch.py."""
FILTERED = "interclass_filtering_threshold"


def str_of(case: dict[str, Any]) -> str:
    return f"{case['loss']}-{case['margin']}-{case.get('threshold')}"


NORMS = {
    "LpNormalization": "n = LpNormalization<axis = 1>(w)  f = LpNormalization<axis = 1>(e)",
    "ReduceL2": """a = ReduceL2<keepdims = 1>(w, one)  b = Clip(a, tiny)  n = Div(w, b)
    c = ReduceL2<keepdims = 1>(e, one)  d = Clip(c, tiny)  f = Div(e, d)""",
}
"""Normalization, also as PyTorch exports it."""


def write(folder: Path, dtype: str, norm: str, loss: str, **how: Any) -> Path:
    """Saves the step of a model whose weights are embeddings and class centres."""
    kind = "double" if dtype == "float64" else "float"
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    head ({kind}[6,5] x) => ({kind}[6,8] cosines)
    <int64[1] one = {{1}}, {kind} tiny = {{1e-12}}>
    {{ e = Add(x, w0)  {NORMS[norm]}  t = Transpose<perm = [1, 0]>(n)  cosines = MatMul(f, t) }}"""
    model = onnx.parser.parse_model(text)
    for name, key in (("w0", "e"), ("w", "w")):
        value = np.array(NUMBERS["inputs"][key], dtype)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    onnx.save(model, folder / "model.onnx")
    grad(folder / "model.onnx", folder / "step.onnx", loss=loss, optimizer="none", **how)
    return folder / "step.onnx"


@pytest.mark.matrix
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 1e-5)])
@pytest.mark.parametrize("case", NUMBERS["cases"], ids=str_of)
def test_losses_and_gradients_of_torch(
    case: dict[str, Any], dtype: str, tolerance: float, norm: str, tmp_path: Path
) -> None:
    """In float32, errors are relative to the largest gradient."""
    how = {"margin": case["margin"], "logit_scale": case["scale"]}
    how["interclass_filtering_threshold"] = case.get("threshold")
    step = write(tmp_path, dtype, norm, case["loss"], **how)
    feeds = {"x": np.zeros((6, 5), dtype), "labels": np.array(NUMBERS["inputs"]["labels"])}
    ((told,), _) = run_unsplit(step, [feeds], [0.0])
    np.testing.assert_allclose(told["loss"], case["value"], rtol=tolerance)
    for found, expected in (("w0.grad", "e.grad"), ("w.grad", "w.grad")):
        limit = tolerance * np.abs(case[expected]).max()
        np.testing.assert_allclose(told[found], case[expected], rtol=0, atol=limit)


def test_an_embedding_that_is_its_centre_has_a_gradient(tmp_path: Path) -> None:
    """Where the sine is 0, PyTorch's gradient is not a number."""
    step = write(tmp_path, "float32", "ReduceL2", "arcface")
    centre = np.array(NUMBERS["inputs"]["w"], np.float32)[[3] * 6]
    x = centre - np.array(NUMBERS["inputs"]["e"], np.float32)
    ((told,), _) = run_unsplit(step, [{"x": x, "labels": np.full(6, 3)}], [0.0])
    assert np.isfinite(told["w.grad"]).all() and np.isfinite(told["w0.grad"]).all()


def test_scores_that_are_no_cosines(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A warning names the operand that no node normalizes."""
    write(tmp_path, "float32", "ReduceL2", "arcface")
    assert not recwarn.list
    plain = """<ir_version: 8, opset_import: ["" : 18]>
    head (float[6,5] x) => (float[6,8] y) { f = LpNormalization<axis = 1>(x)  y = MatMul(f, w) }"""
    model = onnx.parser.parse_model(plain)
    weight = np.array(NUMBERS["inputs"]["w"], np.float32).T
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    with pytest.warns(UserWarning, match="takes 'y' as cosines, but MatMul '.*' reads 'w', which"):
        grad(model, tmp_path / "step.onnx", loss="cosface", optimizer="sgd")


@pytest.mark.parametrize(
    ("loss", "how", "message"),
    [
        ("mse", {"margin": 0.5}, "--margin 0.5: the loss 'mse' has no margin; only arcface"),
        ("softmax-cross-entropy", {"logit_scale": 2.0}, "--logit-scale 2.0: .* leave --logit-sc"),
        ("cosines", {"margin": 0.5}, "the loss 'cosines' has no margin"),
        ("arcface", {"margin": 3.2}, "--margin 3.2: must be 0 or more and below pi"),
        ("cosface", {"margin": -0.1}, "--margin -0.1: must be 0 or more$"),
        ("cosface", {"margin": float("nan")}, "--margin nan: must be 0 or more$"),
        ("cosface", {"logit_scale": 0.0}, "--logit-scale 0.0: must be above 0"),
        ("arcface", {FILTERED: 1.0}, "--interclass-filtering-threshold 1.0: must be above 0 and"),
        ("mse", {FILTERED: 0.4}, "threshold 0.4: the loss 'mse' has no margin; only arcface"),
    ],
)
def test_errors(loss: str, how: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=message):
        write(tmp_path, "float32", "ReduceL2", loss, **how)
    assert not (tmp_path / "step.onnx").exists()
