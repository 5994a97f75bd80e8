"""Steps that only tell gradients: sharded, checked, evaluated on weights that are fed."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from committed import MODELS
from training.steps import CROSS_ENTROPY, MLP, Array, batches, shard, write_step

from onnxpar.cli.command_line import main
from onnxpar.graph.training_spec import Step
from onnxpar.report.compare import Comparison, Report, compare_arrays
from onnxpar.report.compare_training import judge_gradients
from onnxpar.report.unsplit import run_unsplit
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.training import grad


def judged(wanted: dict[str, Array], given: dict[str, Array]) -> dict[str, Comparison]:
    step = Step(gradients={"w": "", "v": "", "k": ""})
    report = Report(tuple(compare_arrays(n, given[n], a) for n, a in wanted.items()))
    return {row.name: row for row in judge_gradients(report, step).rows}


def test_how_gradients_are_measured() -> None:
    """By the largest of each, but at least by a thousandth of the model's; one that is nothing but
    rounding may be off by the rounding of the largest."""
    wanted = {
        "loss": np.float32([1e-6]),
        "w.grad": np.float32([2, 1]),
        "v.grad": np.float32([1e-4, 0]),
        "k.grad": np.float32([1e-8, 0]),
    }
    found = judged(wanted, {n: a + a.dtype.type(1e-8) for n, a in wanted.items()})
    assert found["loss"].error == pytest.approx(1e-2, rel=1e-3) and not found["loss"].ok
    assert found["v.grad"].error == pytest.approx(1e-8 / 2e-3, rel=1e-2) and found["v.grad"].ok
    assert found["k.grad"].error == pytest.approx(1e-5 * 1e-8 / (2 * 2**-23), rel=1e-3)
    for name, off in (("w.grad", 3e-5), ("v.grad", 3e-8), ("k.grad", 3e-7)):
        moved = {**wanted, name: wanted[name] + np.float32(off)}
        assert [row.name for row in judged(wanted, moved).values() if not row.ok] == [name]
    for odd in (math.nan, math.inf):
        assert not judged(wanted, {**wanted, "v.grad": np.float32([odd, 0])})["v.grad"].ok
    assert judged(wanted, {**wanted, "k.grad": np.float64([0, 0])})["k.grad"].fault


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_types(dtype: str) -> None:
    """Rounding is that of each."""
    wanted = {n: np.array([v], dtype) for n, v in (("w.grad", 1), ("k.grad", 1e-20))}
    step = float(ml_dtypes.finfo(dtype).eps)
    assert all(row.ok for row in judged(wanted, wanted).values())
    for off in (step / 2, 8 * step):
        moved = {**wanted, "k.grad": np.array([off], dtype)}
        assert judged(wanted, moved)["k.grad"].ok == (off < step)


def test_nothing_but_zeros() -> None:
    none = {"w.grad": np.zeros(2, np.float32)}
    assert judged(none, none)["w.grad"].ok
    assert not judged(none, {"w.grad": np.float32([0, 1e-9])})["w.grad"].ok


@pytest.mark.slow
def test_an_encoder_whose_key_biases_have_no_gradient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "step.onnx"
    model = MODELS / "bert.legacy.training.onnx"
    grad(model, step, loss=CROSS_ENTROPY, optimizer="none")
    assert main(["check", str(step), "--devices", "2", "--preset", "data-parallel"]) == 0
    assert "all outputs agree" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_with_states_needs_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = str(write_step(MLP, tmp_path, optimizer="adamw"))
    assert main(["check", step, "--devices", "2"]) == 2
    assert "whose states start with zeros ('step'); give --train" in capsys.readouterr().err
    assert main(["check", step, "--devices", "2", "--train", "--steps", "2"]) == 0


def test_an_evaluation_of_weights_that_are_fed(tmp_path: Path) -> None:
    """Or are as they were stored."""
    step = write_step(MLP, tmp_path, optimizer="none")
    par, plan = shard(step, "tensor-parallel 2")
    (batch,) = batches(plan, 1)
    fed = {**batch, "w2": np.full(9, 0.5, np.float32)}
    with ThreadSession(par) as session:
        for feeds in (batch, fed, batch):
            (loss,) = session.run(["evaluation.loss"], feeds)
            assert loss == pytest.approx(run_unsplit(step, feeds)["evaluation.loss"], rel=1e-6)
