"""How good a model is as it is used: without what only training does, and without an update."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from training.models import CONV, DROPOUT
from training.steps import (
    MLP,
    Array,
    ThreadTrainer,
    batches,
    plan_of,
    quiet,
    shard,
    write_step,
)

from onnxpar.cli.command_line import main
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.trainer.loop import evaluate


def accuracy(scores: Array, labels: Array) -> float:
    counts = labels != -100
    return float((scores.argmax(-1) == labels)[counts].mean())


def scores_of(step: Path, x: Array) -> Array:
    model = ort.InferenceSession(str(step.with_name("model.onnx")), quiet())
    return np.asarray(model.run(None, {"x": x})[0])


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["data-parallel 2", "zero3 4", "tensor-parallel 3"])
def test_the_loss_and_the_accuracy_of_a_batch(layout: str, tmp_path: Path) -> None:
    """Of the model as it is now, which stays so; labels that do not count do not."""
    step = write_step(MLP, tmp_path, optimizer="adam")
    par, plan = shard(step, layout)
    (batch,) = batches(plan, 1)
    batch["labels"] = np.array([0, 1, -100, 3, 4, 0, -100, 1])
    scores = scores_of(step, batch["x"])
    with ThreadTrainer(par) as trainer:
        told = [trainer.evaluate(batch) for _ in range(2)]
        assert told[0] == told[1] and sorted(told[0]) == ["accuracy", "loss"]
        assert told[0]["accuracy"] == pytest.approx(accuracy(scores, batch["labels"]))
        first = trainer.step(batch, 0.1)
        assert told[0]["loss"] == pytest.approx(first["loss"], rel=1e-6)
        after = trainer.evaluate(batch)
        assert after["loss"] == pytest.approx(trainer.step(batch, 0.1)["loss"], rel=1e-6)
        assert after["loss"] < told[0]["loss"]


@pytest.mark.parametrize("ends_in_sigmoid", [False, True])
def test_accuracy_of_yes_and_no(ends_in_sigmoid: bool, tmp_path: Path) -> None:
    text = "m (float[4,3] x, float[3,2] w) => (float[4,2] y) { y = MatMul(x, w) }"
    if ends_in_sigmoid:
        text = text.replace("y = MatMul(x, w)", "s = MatMul(x, w)  y = Sigmoid(s)")
    step = write_step(text, tmp_path, "bce")
    par, plan = shard(step, "data-parallel 2")
    (batch,) = batches(plan, 1)
    batch["target"] = (batch["target"] > 0).astype(np.float32)
    said = scores_of(step, batch["x"]) > (0.5 if ends_in_sigmoid else 0)
    with ThreadTrainer(par) as trainer:
        told = trainer.evaluate(batch)
    assert told["accuracy"] == pytest.approx((said == (batch["target"] > 0)).mean())


HEAD = """m (float[8,6] x, float[6,5] w) => (float[8,5] y) { y = MatMul(x, w) }"""


@pytest.mark.parametrize("layout", ["data-parallel 3", "tensor-parallel 2"])
@pytest.mark.parametrize("loss", ["softmax-cross-entropy", "mse", "bce"])
def test_all_samples_of_the_data_count(loss: str, layout: str, tmp_path: Path) -> None:
    """In an evaluation and in an epoch, those of the last batch too, and each label alike."""
    random = np.random.default_rng(3)
    step = write_step(HEAD, tmp_path, loss, accumulate=2)
    par, _ = shard(step, layout)
    x = random.standard_normal((53, 6)).astype(np.float32)
    with ThreadTrainer(par) as trainer:
        w = np.float64(trainer.session.states.read("w"))
        scores = x @ w
        if loss == "softmax-cross-entropy":
            labels = random.integers(0, 5, 53)
            labels[random.permutation(53)[:20]] = -100
            data, counts = {"labels": labels}, labels >= 0
            each = (np.log(np.exp(scores).sum(1)) - scores[np.arange(53), labels * counts])[counts]
        else:
            target = random.integers(0, 2, (53, 5)).astype(np.float32)
            data, counts = {"target": target}, np.ones(53, bool)
            log = np.log1p(np.exp(scores)) - target * scores
            each = (scores - target) ** 2 if loss == "mse" else log
        batches = trainer.batches_of({"x": x, **data}, trains=False)
        assert evaluate(trainer, batches)["loss"] == pytest.approx(each.mean(), rel=1e-5)
        rows = batches.batch
        told = [trainer.step(batch, 0.0)["loss"] for batch in batches.epoch(0, None)]
        of_batch = np.split(counts, range(rows, 53, rows))
        ends = np.cumsum([c.sum() for c in of_batch])[:-1]
        np.testing.assert_allclose(told, [e.mean() for e in np.split(each, ends)], rtol=1e-5)


def test_samples_change_statistics_of_a_batch(tmp_path: Path) -> None:
    """So a step leaves out the last ones of an epoch, unlike an evaluation."""
    step = write_step(CONV, tmp_path, batch_norm="global")
    par, _ = shard(step, "data-parallel 2")
    x = np.random.default_rng(2).standard_normal((11, 2, 6, 6)).astype(np.float32)
    data = {"x": x, "labels": np.arange(11) % 3}
    with ThreadTrainer(par) as trainer:
        assert trainer.batches_of(data).left_out().startswith("each epoch uses 8 of 11 samples")
        batches = trainer.batches_of(data, trains=False)
        told = evaluate(trainer, batches)["loss"]
        twice = {name: np.concatenate([a] * 8) for name, a in data.items()}  # fills batches
        wanted = evaluate(trainer, trainer.batches_of(twice, trains=False))["loss"]
    assert not batches.left_out() and told == pytest.approx(wanted, rel=1e-5)


def test_a_regression_has_a_loss_alone(tmp_path: Path) -> None:
    par, plan = shard(write_step(MLP, tmp_path, "mse"), "data-parallel 2")
    with ThreadTrainer(par) as trainer:
        assert [*trainer.evaluate(next(batches(plan, 1)))] == ["loss"]


def test_dropout_is_off(tmp_path: Path) -> None:
    """Where training draws from its seed, what is evaluated is the whole model."""
    step = write_step(DROPOUT, tmp_path)
    par, plan = shard(step, "data-parallel 2")
    (batch,) = batches(plan, 1)
    with ThreadTrainer(par) as trainer:
        told = trainer.evaluate(batch)
        losses = {trainer.step(batch, 0.0, seed)["loss"] for seed in range(5)}
    off = DROPOUT.replace("bool training = {1}", "bool training = {0}")
    (tmp_path / "off").mkdir()
    scores = scores_of(write_step(off, tmp_path / "off"), batch["x"])
    wide = scores - scores.max(1, keepdims=True)
    log_prob = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    expected = -log_prob[np.arange(8), batch["labels"]].mean()
    assert told["loss"] == pytest.approx(expected, rel=1e-5)
    assert told["accuracy"] == pytest.approx(accuracy(scores, batch["labels"]))
    assert len(losses) == 5 and told["loss"] not in losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("data-parallel 2", {"batch_norm": "global"}),
        ("data-parallel 4", {"batch_norm": "local", "groups": 4}),
    ],
)
def test_batch_norm_uses_the_running_statistics(
    layout: str, how: dict[str, object], tmp_path: Path
) -> None:
    """Those of the model at first, which is the model as it was exported; then what they became."""
    step = write_step(CONV, tmp_path, **how)
    par, plan = shard(step, layout)
    (batch,) = batches(plan, 1)
    scores = scores_of(step, batch["x"])
    with ThreadTrainer(par) as trainer:
        told = trainer.evaluate(batch)
        assert told["accuracy"] == pytest.approx(accuracy(scores, batch["labels"]))
        assert told["loss"] != pytest.approx(trainer.step(batch, 0.0)["loss"], rel=1e-3)
        assert trainer.evaluate(batch)["loss"] != pytest.approx(told["loss"], rel=1e-5)
        before = trainer.session.states.read("mean")
        trainer.evaluate(batch)
        np.testing.assert_array_equal(trainer.session.states.read("mean"), before)


def test_a_model_that_was_exported_for_training(tmp_path: Path) -> None:
    """Whose batch-norms take statistics by themselves: not when it is evaluated."""
    used, trained = tmp_path / "used", tmp_path / "trained"
    used.mkdir()
    trained.mkdir()
    batch_norm = "n = BatchNormalization(h"
    training = "n, u, v = BatchNormalization<training_mode = 1>(h"
    step = write_step(CONV.replace(batch_norm, training), trained)
    par, plan = shard(step, "data-parallel 2")
    (batch,) = batches(plan, 1)
    scores = scores_of(write_step(CONV, used), batch["x"])
    with ThreadTrainer(par) as trainer:
        told = trainer.evaluate(batch)
    log_prob = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    expected = -log_prob[np.arange(8), batch["labels"]].mean()
    assert told["loss"] == pytest.approx(expected, rel=1e-5)


def test_training_evaluates_nothing(tmp_path: Path) -> None:
    """It is a program of its own: no collective of the plan belongs to it."""
    plan = plan_of(write_step(DROPOUT, tmp_path), "data-parallel 2")
    assert not any("evaluation" in c.tensor for c in plan.collectives)


@pytest.mark.processes
def test_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each epoch, and among the metrics."""
    monkeypatch.setattr(
        "onnxpar.trainer.trainer.InferenceSession", lambda par, **options: ThreadSession(par)
    )
    par, _ = shard(write_step(MLP, tmp_path), "data-parallel 2")
    draw = np.random.default_rng(3)
    for name, count in (("train", 24), ("eval", 20)):
        x = draw.standard_normal((count, 6)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, labels=draw.integers(0, 5, count))
    files = ["--data", str(tmp_path / "train.npz"), "--eval", str(tmp_path / "eval.npz")]
    how = ["--lr", "0.1", "--epochs", "2", "--log-dir", str(tmp_path / "log")]
    assert main(["train", str(par), *files, *how]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1].split()[0] for line in shown if " evaluation:" in line] == ["1", "2"]
    lines = (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if "eval_loss" in row] == [3, 6]
    assert {*rows[-1]} >= {"eval_loss", "eval_accuracy"}
    assert main(["train", str(par), *files[:3], str(tmp_path / "none.npz"), *how]) == 2
