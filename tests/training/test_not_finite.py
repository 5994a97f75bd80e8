"""Updates that are not finite are not applied, on any rank, and are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.steps import Array, ThreadTrainer, same, shard, states, write_step

from onnxpar.errors import DivergenceError
from onnxpar.trainer.trainer import Trainer

ROOT = """m (float[8,4] x, float[4,4] w, float[4,1] w2) => (float l)
<float[4] b = {1, 1, 0, 1}>
{ h = MatMul(x, w)  s = Mul(h, h)  t = Add(s, b)  r = Sqrt(t)  y = MatMul(r, w2)
  l = ReduceMean<keepdims = 0>(y) }"""
"""Its third column is the absolute value of a number, by a root whose gradient at 0 is infinite."""


def batch(seed: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((8, 4)).astype(np.float32)}


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
        with pytest.raises(DivergenceError, match=r"update of '[wbv]' .*is not finite"):
            trainer.step(x, 0.1)
        same(states(trainer), before)
        for seed in (2, 3):
            assert trainer.step(batch(seed), 0.1) == other.step(batch(seed), 0.1)
        same(states(trainer), states(other))


@pytest.mark.processes
def test_ranks_that_are_processes(tmp_path: Path) -> None:
    par, _ = shard(write_step(ROOT, tmp_path, "l", "adam"), "zero1 2")
    with Trainer(par) as trainer:
        trainer.step(batch(0), 0.1)
        before = states(trainer)
        with pytest.raises(DivergenceError, match="not finite, and was not applied"):
            trainer.step({"x": np.full((8, 4), np.inf, np.float32)}, 0.1)
        same(states(trainer), before)


def test_an_update_that_is_too_large(tmp_path: Path) -> None:
    """Of finite gradients."""
    par, _ = shard(write_step(ROOT, tmp_path, "l"), "data-parallel 2")
    with ThreadTrainer(par) as trainer:
        before = states(trainer)
        with pytest.raises(DivergenceError, match="is not finite, and was not applied"):
            trainer.step({"x": batch(0)["x"] * 1e3}, 3e38)
        same(states(trainer), before)


def test_the_least_loss_scale(tmp_path: Path) -> None:
    """A dynamic scale is halved down to 1; what is not finite there ends the run."""
    step = write_step(ROOT, tmp_path, "l", precision="float16", loss_scale="dynamic")
    par, _ = shard(step, "data-parallel 2")
    bad = {"x": np.full((8, 4), np.nan, np.float32)}
    with ThreadTrainer(par) as trainer:
        skipped = 0
        with pytest.raises(DivergenceError, match="not finite at the least loss scale, 1"):
            while skipped < 40:
                skipped += int(trainer.step(bad, 0.1)["skipped"])
        assert skipped == 15 and trainer.session.states.read("loss_scale") == 1
        assert trainer.step(batch(1), 0.1)["skipped"] == 0
