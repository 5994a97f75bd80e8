"""Which parameters a weight decay leaves out, and groups of parameters."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from training.steps import LINEAR, MLP, run_unsplit, write_step

import onnxpar.training.gradients  # noqa: F401
from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.planner.context import load_model
from onnxpar.planner.options import Options
from onnxpar.training.decay import undecayed
from onnxpar.training.gradients.trained import find_trained
from onnxpar.training.parameter_groups import Group

MODELS = Path(__file__).parents[2] / "models"
BY_NAME = re.compile(r"\.bias|bias_(ih|hh)|norm|\.ln_|\.bn", re.IGNORECASE)
"""Names in PyTorch of biases and of parameters of normalizations."""


@pytest.mark.parametrize(
    "name",
    [
        "gpt2.legacy.training",
        "llama.legacy.training",
        pytest.param("bert.legacy.training", marks=pytest.mark.slow),
        pytest.param("lstm.legacy.training", marks=pytest.mark.slow),
        pytest.param("mixtral.legacy.training", marks=pytest.mark.slow),
        pytest.param("resnet.legacy.training", marks=pytest.mark.slow),
        pytest.param("t5.legacy.training", marks=pytest.mark.slow),
        "unet.legacy.training",
    ],
)
def test_biases_and_norms_by_their_names_in_torch(name: str) -> None:
    """Also of LayerNorms, RMSNorms and GroupNorms that the exporter wrote as other ops."""
    model = load_model(MODELS / f"{name}.onnx", Options(), for_training=True)
    trained = {t.name for t in find_trained(model).trained}
    expected = {n for n in trained if BY_NAME.search(n)}
    assert 0 < len(expected) < len(trained)
    assert undecayed(model.graph) & trained == expected


NORM = """norm (float[4,3,2] x, float[3,2] w1, float[3,2] w2, float[3,2] w3, float[3,2] w4,
float[3,2] w5, float[2,2] w6, float[1,1,2] w7)
=> (float[4,3,2] y) <float eps = {1e-5}, int64[2] last = {1, 2}>
{ a = LayerNormalization<axis = 1>(x, w1, w2)
  m = ReduceMean(a, last)  d = Sub(a, m)  q = Mul(d, d)  v = ReduceMean(q, last)
  s = Add(v, eps)  r = Sqrt(s)  n = Div(d, r)  b = Mul(n, w3)  c = Add(b, w4)
  e = Mul(c, w5)  f = MatMul(e, w6)  y = Add(f, w7) }"""


def test_scales_of_several_dimensions(tmp_path: Path) -> None:
    """A factor of numbers that are not normalized is no scale of a normalization."""
    path = write_step(NORM, tmp_path, "mse", "adamw")
    draw = np.random.default_rng(1)
    x, target = (draw.standard_normal((4, 3, 2)).astype(np.float32) for _ in range(2))
    told, step = run_unsplit(path, [{"x": x, "target": target}], [0.0])
    assert step.groups == {
        "weight_decay=0, biases and scales of normalizations": ["w1", "w2", "w3", "w4", "w7"],
        "weight_decay=0.01": ["w5", "w6"],
    }
    assert np.isfinite(told[0]["loss"])


def test_the_summary_tells_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_step(MLP, tmp_path, "mse")
    model, step = str(tmp_path / "model.onnx"), str(tmp_path / "step.onnx")
    how = ["--loss", "mse", "--optimizer", "adamw", "--group", "w[12]:lr-scale=0.5", "-o", step]
    assert main(["grad", model, *how]) == 0
    told = capsys.readouterr().out
    assert "1 parameter: --group w[12]:lr-scale=0.5, weight_decay=0.01\n" in told
    assert (
        "1 parameter: --group w[12]:lr-scale=0.5, weight_decay=0, biases and scales of "
        "normalizations\n"
    ) in told
    assert "1 parameter: weight_decay=0.01\n" in told
    assert main(["grad", model, *how, "--decay-all"]) == 0
    assert "2 parameters: weight_decay=0.01\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["w", "w:", ":lr_scale=1", "w:lr_scale", "w:lr_scale=x", "w:lr_scale=-1", "w:=2"]
)
def test_a_group_is_a_glob_and_numbers(text: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(f"--group {text!r}: write a glob")):
        Group.parse(text)


def test_a_glob_may_have_a_colon() -> None:
    assert Group.parse("a:b:lr_scale=2,beta1=0.5").glob == "a:b"


@pytest.mark.parametrize(
    ("group", "optimizer", "message"),
    [
        ("v*:lr_scale=2", "sgd", r"--group v\* matches no weight"),
        ("w:beta1=0.5", "sgd", "--group w:beta1=0.5: .* 'beta1'; give lr_scale, weight_decay"),
        ("w:optimizer=adamz", "sgd", "adamz"),
        ("w:optimizer=none", "sgd", "--group 'w:optimizer=none': write"),
        ("w:weight_decay=-1", "sgd", "weight_decay is -1.0"),
        ("w:lr_scale=2", "none", "--group is for steps that update"),
    ],
)
def test_groups_that_cannot_be(group: str, optimizer: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=message):
        write_step(LINEAR, tmp_path, "mse", optimizer, group=[group])
