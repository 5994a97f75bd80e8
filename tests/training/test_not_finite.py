"""Updates that are not finite are not applied, on any rank, and are told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.steps import Array, ThreadTrainer, same, shard, states, write_step

from onnxpar.base.errors import DivergenceError
from onnxpar.trainer.checkpoint import Checkpoint
from onnxpar.trainer.loop import Run, records
from onnxpar.trainer.trainer import Trainer

ROOT = """m (float[8,4] x, float[4,4] w, float[4,1] w2) => (float l)
<float[4] b = {1, 1, 0, 1}>
{ h = MatMul(x, w)  s = Mul(h, h)  t = Add(s, b)  r = Sqrt(t)  y = MatMul(r, w2)
  l = ReduceMean<keepdims = 0>(y) }"""
"""Its third column is the absolute value of a number, by a root whose gradient at 0 is infinite."""


def batch(seed: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((8, 4)).astype(np.float32)}


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("data-parallel 3", {"optimizer": "adamw"}),
        ("zero2 2", {"optimizer": "momentum", "clip_norm": 1.0}),
        ("tensor-parallel 2", {"optimizer": "sgd"}),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["in the first step", "later"])
def test_a_gradient_of_a_finite_loss(
    layout: str, how: dict[str, Any], first: bool, tmp_path: Path
) -> None:
    """That of a root of zero. A run goes on from the states before."""
    par, _ = shard(write_step(ROOT, tmp_path, "l", **how), layout)
    with ThreadTrainer(par) as trainer, ThreadTrainer(par) as other:
        if not first:
            assert trainer.step(batch(0), 0.0) == other.step(batch(0), 0.0)
        before = states(other)
        x = batch(1)
        x["x"][5] = 0
        told = trainer.step(x, 0.1)
        assert np.isfinite(told["loss"]) and told["skipped"] == 1
        assert re.fullmatch(r"the update of 'w' .*is not finite", trainer.problem)
        same(states(trainer), before)
        for seed in (2, 3):
            assert trainer.step(batch(seed), 0.1) == other.step(batch(seed), 0.1)
        same(states(trainer), states(other))


@pytest.mark.parametrize("strategy", [None, {"place": {"w": "host"}}], ids=["memory", "host"])
def test_rows_of_a_table(strategy: dict[str, Any] | None, tmp_path: Path) -> None:
    """That a step looks up; it reads no others."""
    text = """m (int64[4] i, float[50,3] w) => (float[4,3] r) { r = Gather(w, i) }"""
    par, _ = shard(
        write_step(text, tmp_path, "mse", lazy=["w"]), "data-parallel 2", strategy=strategy
    )
    feeds = {"i": np.array([3, 49, 3, 0]), "target": np.zeros((4, 3), np.float32)}
    with ThreadTrainer(par) as trainer:
        before = states(trainer)
        assert trainer.step(feeds, 3e38)["skipped"] == 1
        assert trainer.problem == "the update of 'w' is not finite"
        same(states(trainer), before)
        assert "skipped" not in trainer.step(feeds, 0.1)
        changed = (states(trainer)["w"] != before["w"]).any(1)
    np.testing.assert_array_equal(np.flatnonzero(changed), [0, 3, 49])


@pytest.mark.processes
def test_ranks_that_are_processes(tmp_path: Path) -> None:
    par, _ = shard(write_step(ROOT, tmp_path, "l", "adam"), "zero1 2")
    with Trainer(par) as trainer:
        trainer.step(batch(0), 0.1)
        before = states(trainer)
        with pytest.raises(DivergenceError, match=r"the loss is (inf|nan)"):
            trainer.step({"x": np.full((8, 4), np.inf, np.float32)}, 0.1)
        same(states(trainer), before)


def test_an_update_that_is_too_large(tmp_path: Path) -> None:
    """Of finite gradients."""
    par, _ = shard(write_step(ROOT, tmp_path, "l"), "data-parallel 2")
    with ThreadTrainer(par) as trainer:
        before = states(trainer)
        assert trainer.step({"x": batch(0)["x"] * 1e3}, 3e38)["skipped"] == 1
        same(states(trainer), before)


def test_the_least_loss_scale(tmp_path: Path) -> None:
    """A dynamic scale is halved down to 1, from which it recovers."""
    step = write_step(ROOT, tmp_path, "l", precision="float16", loss_scale="dynamic")
    par, _ = shard(step, "data-parallel 2")
    bad = {"x": np.full((8, 4), np.nan, np.float32)}
    with ThreadTrainer(par) as trainer:
        for number in range(20):
            assert trainer.step(bad, 0.1)["skipped"] == 1
            scale = max(65536 / 2 ** (number + 1), 1)
            assert trainer.session.states.read("loss_scale") == scale
        before = states(trainer)["w"]
        assert trainer.step(batch(1), 0.1)["skipped"] == 0 and not trainer.problem
        assert not np.array_equal(states(trainer)["w"], before)


@pytest.mark.parametrize("bad", [[2], range(5)], ids=["one step", "all steps"])
def test_a_run(bad: Sequence[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on, and says which steps were not applied; it fails if none was."""
    par, _ = shard(write_step(ROOT, tmp_path, "l", "adam"), "zero1 2")
    x = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    x[[8 * i for i in bad]] = 0
    run = Run(1, 0.1, shuffle=False, checkpoint=tmp_path / "c", every=1, keep=1)
    with ThreadTrainer(par) as trainer:
        made = records(trainer, trainer.batches_of({"x": x}), run)
        skipped = [next(made).values.get("skipped", 0) for _ in range(5)]
        assert skipped == [float(i in bad) for i in range(5)]
        with nullcontext() if len(bad) == 1 else pytest.raises(DivergenceError, match="no step of"):
            next(made, None)
    said = capsys.readouterr().err
    for i in range(5):
        text = f"epoch 1, step {i + 1}: the update of 'w' is not finite: nothing was updated"
        assert (text in said) == (i in bad)
    found = Checkpoint.load(tmp_path / "c")
    assert all(np.isfinite(found.states.read(s.input)).all() for s in found.slots)
