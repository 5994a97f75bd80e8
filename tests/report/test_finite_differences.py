"""Gradients compared with differences of the loss, which know nothing of how gradients are made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from training.models import DROPOUT
from training.steps import CROSS_ENTROPY, MLP, Array, write_step

from onnxpar.cli.command_line import main
from onnxpar.graph.training_spec import Step
from onnxpar.report.finite_differences import compare_gradients

NORMED = """m (float[8,3,5] x, float[4,3,3] w1, float[4] w2, float[4] w3, float[20,5] w4)
=> (float[8,5] y)
<float[4] mean = {0, 0, 0, 0}, float[4] var = {1, 1, 1, 1}>
{ c = Conv<pads = [1, 1]>(x, w1)
  n, m2, v2 = BatchNormalization<training_mode = 1>(c, w2, w3, mean, var)
  r = Relu(n)  f = Flatten(r)  y = MatMul(f, w4) }"""
STOPPED = MLP.replace("y = Gemm", "d = Identity(r)  y = Gemm").replace("Gemm(r,", "Gemm(d,")
EQUAL = (
    MLP.replace("w4)", "w4, float[6,9] w5)", 1)
    .replace("Gemm(x, w1", "Gemm(x, e")
    .replace("{ h", "{ e = Add(w1, w5)  h")
)


def spec_of(step: Path) -> Step:
    found = Step.of(onnx.load(step))
    assert found is not None
    return found


def batch_of(step: Path) -> dict[str, Array]:
    draw = np.random.default_rng(2)
    ports = {
        p.name: [d.dim_value for d in p.type.tensor_type.shape.dim]
        for p in onnx.load(step).graph.input
    }
    feeds: dict[str, Array] = {"x": draw.standard_normal(ports["x"]).astype(np.float32)}
    return {**feeds, "labels": draw.integers(0, 5, ports["labels"])}


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (MLP, {}),
        (MLP, {"optimizer": "adamw", "clip_norm": 1e-3, "accumulate": 3}),
        (MLP, {"loss_scale": "8"}),
        (MLP, {"loss_scale": "dynamic", "optimizer": "adam", "ema": 0.9}),
        (NORMED, {"optimizer": "lion"}),
        (NORMED, {"batch_norm": "local", "groups": 2}),
        (DROPOUT, {"recompute": True}),
        (EQUAL, {"frozen": ["w5"]}),
    ],
)
def test_right_gradients(text: str, how: dict[str, Any], tmp_path: Path) -> None:
    step = write_step(text, tmp_path, **how)
    (row,), sentence = compare_gradients(step, spec_of(step), batch_of(step), seconds=60)
    count = len(spec_of(step).gradients)
    assert row.ok and row.error < 0.02 and row.shape[0] >= count - 1
    assert (sentence == "") == (row.shape == (count,))


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0, -1.0])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("name", ["w1", "w4"])
def test_wrong_gradients(factor: float, share: float, name: str, tmp_path: Path) -> None:
    """All, or some of the elements, are a multiple of what they should be."""
    path = write_step(MLP, tmp_path, optimizer="adam")
    spec, model = spec_of(path), onnx.load(path)
    shape = next(t.dims for t in model.graph.initializer if t.name == name)
    factors = np.where(np.random.default_rng(1).random(shape) < share, factor, 1)
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(factors.astype(np.float32), "factors")
    )
    wrong = onnx.helper.make_node("Mul", [spec.gradients[name], "factors"], ["wrong"])
    model.graph.node.append(wrong)
    onnx.save(model, path)
    spec = replace(spec, gradients={**spec.gradients, name: "wrong"})
    (row,), _ = compare_gradients(path, spec, batch_of(path), seconds=60)
    assert not row.ok and row.fault == f"the loss does not change as the gradient of '{name}' says"


def test_gradients_that_differences_cannot_tell(tmp_path: Path) -> None:
    for how, reason in (
        ({"precision": "bfloat16"}, "the loss is computed in bfloat16"),
        ({"stop_gradient": ["d"]}, "gradients are stopped on the way"),
    ):
        step = write_step(STOPPED, tmp_path, CROSS_ENTROPY, **how)
        rows, sentence = compare_gradients(step, spec_of(step), batch_of(step))
        assert (rows, sentence) == (
            [],
            f"no gradient is compared with differences of the loss: {reason}",
        )


def test_the_time_ends_before_a_run(tmp_path: Path) -> None:
    """So that a step which takes longer than the limit runs but once."""
    step = write_step(MLP, tmp_path)
    rows, sentence = compare_gradients(step, spec_of(step), batch_of(step), seconds=0)
    assert (rows, sentence) == ([], "0 of 4 gradients are compared with differences of the loss")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = write_step(MLP, tmp_path, optimizer="adam")
    assert main(["check", str(step), "--devices", "2", "--train", "--steps", "2"]) == 0
    assert "gradients, by differences" in capsys.readouterr().out
