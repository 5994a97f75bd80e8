"""Moving averages of parameters: as PyTorch computes them, evaluated, and written to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from training.models import CONV
from training.steps import (
    LINEAR,
    MLP,
    Array,
    ThreadTrainer,
    check_training,
    quiet,
    run_unsplit,
    shard,
    write_model,
    write_step,
)

from onnxpar.base.errors import ModelError, StrategyError
from onnxpar.cli.command_line import main
from onnxpar.trainer.checkpoint import Progress
from onnxpar.trainer.merge import merge
from onnxpar.training import grad

DECAY = 0.8
DRAW = np.random.default_rng(4)
BATCH = {
    "x": DRAW.standard_normal((8, 6)).astype(np.float32),
    "target": DRAW.standard_normal((8, 5)).astype(np.float32),
}


def averaged(each: list[Array]) -> Array:
    """torch.optim.swa_utils.get_ema_multi_avg_fn: the first one, then p.lerp_(next, 1 - decay)."""
    average = each[0].astype(np.float64)
    for value in each[1:]:
        average = average + (value - average) * (1 - DECAY)
    return np.asarray(average)


def loss_of(model: Path, batch: dict[str, Array]) -> float:
    session = ort.InferenceSession(str(model), quiet(), ["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": batch["x"]})
    return float(((y - batch["target"]) ** 2).mean())


def test_averages_in_torch() -> None:
    torch: Any = pytest.importorskip("torch")
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    layer = torch.nn.Linear(3, 1, bias=False)
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    each = list(np.random.default_rng(1).standard_normal((4, 1, 3)).astype(np.float32))
    for value in each:
        layer.weight.data = torch.tensor(value)
        average.update_parameters(layer)
    found = average.module.weight.detach().numpy()
    np.testing.assert_allclose(averaged(each), found, rtol=1e-5, atol=1e-6)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("layout", ["data-parallel 2", "zero2 2", "zero3 3", "tensor-parallel 2"])
def test_averages_are_kept_evaluated_and_written(layout: str, tmp_path: Path) -> None:
    path = write_step(MLP, tmp_path, "mse", "momentum", ema=DECAY)
    told, step = run_unsplit(path, [BATCH] * 4, [0.1] * 4)
    start = {n.name: n for n in onnx.load(tmp_path / "model.onnx").graph.initializer}
    for slot in step.parameters:
        expected = averaged([got[slot.output] for got in told])
        np.testing.assert_allclose(
            told[-1][f"{slot.input}.ema.next"], expected, rtol=1e-5, atol=1e-6
        )
    with ThreadTrainer(shard(path, layout)[0]) as trainer:
        before = trainer.evaluate(BATCH)["loss"]
        assert before == pytest.approx(loss_of(tmp_path / "model.onnx", BATCH), rel=1e-5)
        for _ in range(4):
            trainer.step(BATCH, 0.1)
        for slot in step.parameters:
            found = trainer.session.states.read(f"{slot.input}.ema")
            np.testing.assert_allclose(
                found, told[-1][f"{slot.input}.ema.next"], rtol=1e-4, atol=1e-6
            )
        trainer.save(tmp_path / "run", Progress(4))
        evaluated = trainer.evaluate(BATCH)["loss"]
    last, average = tmp_path / "last.onnx", tmp_path / "average.onnx"
    assert merge(tmp_path / "run", tmp_path / "model.onnx", last) == len(start)
    assert merge(tmp_path / "run", tmp_path / "model.onnx", average, ema=True) == len(start)
    assert evaluated == pytest.approx(loss_of(average, BATCH), rel=1e-4)
    assert abs(evaluated / loss_of(last, BATCH) - 1) > 1e-3
    stored = {t.name: t for t in onnx.load(last).graph.initializer}
    for slot in step.parameters:
        value = numpy_helper.to_array(stored[slot.input])
        np.testing.assert_allclose(value, told[-1][slot.output], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (MLP, {"accumulate": 2}),
        (MLP, {"precision": "bfloat16"}),
        (CONV, {"batch_norm": "global"}),
    ],
    ids=["accumulate", "precision", "batch-norm"],
)
def test_ranks_keep_the_same_averages(text: str, how: dict[str, Any], tmp_path: Path) -> None:
    step = write_step(text, tmp_path, optimizer="sgd", ema=DECAY, **how)
    check_training(step, "zero2 2", 4)


def test_a_skipped_step_moves_no_average(tmp_path: Path) -> None:
    path = write_step(MLP, tmp_path, "mse", "sgd", ema=DECAY, precision="float16")
    large = {**BATCH, "x": BATCH["x"] * 1e30}
    told, step = run_unsplit(path, [large, *[BATCH] * 8], [0.1] * 9)
    taken = [got for got in told if not got["skipped"]]
    assert told[0]["skipped"] and len(taken) >= 2
    for slot in step.parameters:
        expected = averaged([got[slot.output] for got in taken])
        found = told[-1][f"{slot.input}.ema.next"]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_weights_in_another_file(tmp_path: Path) -> None:
    model = onnx.load(write_model(MLP, tmp_path))
    onnx.save(model, tmp_path / "large.onnx", save_as_external_data=True, size_threshold=0)
    how: dict[str, Any] = {"loss": "mse", "optimizer": "sgd", "ema": DECAY}
    grad(tmp_path / "large.onnx", tmp_path / "step.onnx", **how)
    with ThreadTrainer(shard(tmp_path / "step.onnx", "zero3 2")[0]) as trainer:
        expected = loss_of(tmp_path / "model.onnx", BATCH)
        assert trainer.evaluate(BATCH)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"ema": 1.0}, "--ema 1.0: must be from 0 to below 1"),
        ({"ema": 0.9, "optimizer": "none"}, "--ema is for steps that update"),
        ({"ema": 0.9, "lazy": ["w"]}, "--lazy and --ema: each step moves"),
    ],
)
def test_averages_that_cannot_be(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=message):
        write_step(LINEAR, tmp_path, "mse", **how)


def test_a_checkpoint_without_averages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_step(MLP, tmp_path, "mse")
    with ThreadTrainer(shard(path, "data-parallel 2")[0]) as trainer:
        trainer.save(tmp_path / "run", Progress(1))
    with pytest.raises(ModelError, match="has no moving averages; leave --ema out"):
        merge(tmp_path / "run", tmp_path / "model.onnx", tmp_path / "out.onnx", ema=True)
    out = str(tmp_path / "out.onnx")
    words = ["checkpoint", "merge", str(tmp_path / "run"), str(tmp_path / "model.onnx"), "--ema"]
    assert main([*words, "-o", out]) == 2
    assert "has no moving averages" in capsys.readouterr().err
