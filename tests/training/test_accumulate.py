"""Gradients of a large batch, a part at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training.models import CONV, DROPOUT, MOE
from training.steps import (
    DOUBLE,
    LINEAR,
    MLP,
    Array,
    ThreadTrainer,
    batches,
    check_training,
    plan_of,
    run_unsplit,
    shard,
    write_step,
)

from onnxpar.base.errors import InputError, StrategyError

DRAW = np.random.default_rng(8)


def wide(count: int) -> dict[str, Array]:
    return {"x": DRAW.standard_normal((count, 6)), "labels": DRAW.integers(0, 5, count)}


@pytest.mark.parametrize("parts", [2, 3])
def test_as_one_large_batch(parts: int, tmp_path: Path) -> None:
    """Loss and update, the clipped norm too, are those of a model of that batch."""
    (tmp_path / "large").mkdir()
    how = {"optimizer": "adam", "clip_norm": 0.5}
    small = write_step(DOUBLE, tmp_path, accumulate=parts, **how)
    large = write_step(DOUBLE.replace("[8,", f"[{8 * parts},"), tmp_path / "large", **how)
    feeds, rates = [wide(8 * parts) for _ in range(3)], [0.1] * 3
    (found, step), (wanted, _) = (run_unsplit(path, feeds, rates) for path in (small, large))
    assert step.turns == parts
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in b.keys() - {"evaluation.accuracy"}:  # which is float32
            np.testing.assert_allclose(a[name], b[name], rtol=1e-10, atol=1e-14, err_msg=name)


AFFINE = """m (float[4,6] x, float[6,5] w) => (float[4,5] y) { y = MatMul(x, w) }"""


@pytest.mark.parametrize("layout", [None, "data-parallel 2", "tensor-parallel 3"])
def test_each_label_counts_alike(layout: str | None, tmp_path: Path) -> None:
    """Also if parts have different numbers of labels, or none: in a closed form."""
    step = write_step(AFFINE, tmp_path, accumulate=4)
    x, labels = DRAW.standard_normal((16, 6)).astype(np.float32), DRAW.integers(0, 5, 16)
    labels[1:8] = -100
    labels[9] = -100
    feeds = {"x": x, "labels": labels}
    (before, _) = run_unsplit(step, [feeds], [0.0])
    w, counts = np.float64(before[0]["w.next"]), labels != -100
    scores = x @ w
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    losses = -np.log(p[np.arange(16), labels * counts])
    gradient = x.T @ ((p - np.eye(5)[labels * counts]) * counts[:, None]) / counts.sum()
    if layout is None:
        (found,), _ = run_unsplit(step, [feeds], [1.0])
        evaluated = {"loss": found["evaluation.loss"], "accuracy": found["evaluation.accuracy"]}
    else:
        par, _ = shard(step, layout)
        with ThreadTrainer(par) as trainer:
            evaluated = trainer.evaluate(feeds)
            loss, after = trainer.run(["loss", "w.next"], feeds, 1.0)
        found = {"loss": loss, "w.next": after}
    np.testing.assert_allclose(found["loss"], losses[counts].mean(), rtol=1e-5)
    np.testing.assert_allclose(w - found["w.next"], gradient, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(evaluated["loss"], losses[counts].mean(), rtol=1e-5)
    right = (scores.argmax(1) == labels)[counts].mean()
    np.testing.assert_allclose(evaluated["accuracy"], right, rtol=1e-6)


@pytest.mark.parametrize("layout", ["data-parallel 2", "tensor-parallel 3"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_label_that_is_no_class(layout: str, accumulate: int, tmp_path: Path) -> None:
    par, _ = shard(write_step(AFFINE, tmp_path, accumulate=accumulate), layout)
    labels = np.arange(4 * accumulate) % 5
    x = np.zeros((len(labels), 6), np.float32)
    with ThreadTrainer(par) as trainer:
        for bad in (5, -1):
            labels[2] = bad
            with pytest.raises(InputError, match=rf"'labels': label {bad} at \[2\] is none of"):
                trainer.step({"x": x, "labels": labels.astype(">i8")}, 0.1)
        labels[2] = -100
        assert np.isfinite(trainer.step({"x": x, "labels": labels.astype(">i8")}, 0.1)["loss"])


def test_statistics_run_through_the_parts(tmp_path: Path) -> None:
    """As two steps of which the first updates nothing else."""
    small = write_step(CONV, tmp_path, batch_norm="global", accumulate=2)
    (tmp_path / "one").mkdir()
    one = write_step(CONV, tmp_path / "one", batch_norm="global")
    x = DRAW.standard_normal((16, 2, 6, 6)).astype(np.float32)
    labels = DRAW.integers(0, 3, 16)
    found, _ = run_unsplit(small, [{"x": x, "labels": labels}], [0.0])
    halves = [{"x": x[i : i + 8], "labels": labels[i : i + 8]} for i in (0, 8)]
    wanted, _ = run_unsplit(one, halves, [0.0] * 2)
    for name in ("mean.next", "variance.next"):
        np.testing.assert_allclose(found[0][name], wanted[1][name], rtol=1e-5, atol=1e-6)
    loss = (wanted[0]["loss"] + wanted[1]["loss"]) / 2
    np.testing.assert_allclose(found[0]["loss"], loss, rtol=1e-5)


def test_what_is_random_differs_between_the_parts(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = write_step(DROPOUT, tmp_path / "one")
    small = write_step(DROPOUT, tmp_path, accumulate=2)
    x = DRAW.standard_normal((8, 6)).astype(np.float32)
    labels = DRAW.integers(0, 5, 8)
    twice = {"x": np.concatenate([x, x]), "labels": np.concatenate([labels, labels])}
    (par, _), (other, _) = shard(small, "data-parallel 2"), shard(one, "data-parallel 2")
    with ThreadTrainer(par) as trainer, ThreadTrainer(other) as alone:
        loss = trainer.step(twice, 0.0, 7)["loss"]
        each = [alone.step({"x": x, "labels": labels}, 0.0, s)["loss"] for s in (14, 15)]
    assert each[0] != each[1]
    assert loss == pytest.approx(sum(each) / 2, rel=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    ["data-parallel 2", "data-parallel 3", "tensor-parallel 3", "zero2 2", "zero3 dp=2,tp=2"],
)
def test_ranks_agree_with_one(layout: str, tmp_path: Path) -> None:
    check_training(write_step(DOUBLE, tmp_path, accumulate=3, clip_norm=0.5), layout, 8)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("text", "layout", "how"),
    [
        (CONV, "data-parallel 2", {"batch_norm": "global"}),
        (MOE, "expert-parallel 2", {}),
        (DROPOUT, "zero3 2", {}),
    ],
)
def test_other_models_agree(text: str, layout: str, how: dict[str, object], tmp_path: Path) -> None:
    check_training(write_step(text, tmp_path, accumulate=2, **how), layout, 5, 0.01)


def test_gradients_are_summed_over_ranks_once_a_step(tmp_path: Path) -> None:
    """The sums stay pending while the parts are taken."""
    plan = plan_of(write_step(MLP, tmp_path, accumulate=4), "data-parallel 2")
    (one,) = [c for c in plan.collectives if c.bytes > 64]
    assert one.kind == "AllReduce" and one.bytes == (6 * 9 + 9 + 9 * 5 + 5) * 4  # and of the labels
    port = next(p for p in plan.inputs if p.name == "x")
    assert port.shape == (32, 6)


def test_evaluation_takes_as_many(tmp_path: Path) -> None:
    par, plan = shard(write_step(MLP, tmp_path, accumulate=2), "data-parallel 2")
    (batch,) = batches(plan, 1)
    with ThreadTrainer(par) as trainer:
        told = trainer.evaluate(batch)
        assert told["loss"] == pytest.approx(trainer.step(batch, 0.1)["loss"], rel=1e-5)
        assert 0 <= told["accuracy"] <= 1


@pytest.mark.parametrize("parts", [0, -1, 1 << 70])
def test_parts_that_do_not_fit(parts: int, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=f"--accumulate {parts}: .* micro-batches from 2 to"):
        write_step(LINEAR, tmp_path, "mse", accumulate=parts)
