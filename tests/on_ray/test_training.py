"""Trainers on two nodes of a Ray cluster take the steps that processes of this host take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_ray.on_nodes import TIMEOUT, actors
from training.steps import MLP, batches, same, shard, states, write_step

from onnxpar.trainer import trainer
from onnxpar.trainer.checkpoint import Progress
from onnxpar.training import train

pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("cluster")


def steps_of(made: Any, plan: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """The metrics of three steps, and all that is kept behind them."""
    with made:
        return [made.step(b, 0.1, seed=7) for b in batches(plan, 3)], states(made)


@pytest.mark.parametrize("layout", ["zero1 2", "hybrid dp=2,tp=2"])
def test_steps_are_those_of_processes_on_this_host(layout: str, tmp_path: Path) -> None:
    from onnxpar.ray import Trainer

    par, plan = shard(write_step(MLP, tmp_path, optimizer="adam"), layout)
    metrics, kept = steps_of(trainer.Trainer(par, timeout=TIMEOUT), plan)
    found, theirs = steps_of(Trainer(par, actors=actors(), timeout=TIMEOUT), plan)
    assert found == metrics
    same(theirs, kept)


def test_checkpoints(tmp_path: Path) -> None:
    from onnxpar.ray import Trainer

    par, plan = shard(write_step(MLP, tmp_path, optimizer="adam"), "zero1 2")
    (batch,) = batches(plan, 1)
    with Trainer(par, actors=actors(), timeout=TIMEOUT) as first:
        first.step(batch, 0.1)
        first.save(tmp_path / "checkpoints", Progress(1, 0, 1))
        wanted = states(first)
    with trainer.Trainer(par, timeout=TIMEOUT) as second:  # processes of this host go on
        second.load(tmp_path / "checkpoints")
        same(states(second), wanted)


def test_a_whole_run(tmp_path: Path) -> None:
    draw = np.random.default_rng(9)
    x = draw.standard_normal((16, 6)).astype(np.float32)
    samples = {"x": x, "labels": draw.integers(0, 5, 16)}
    par, _ = shard(write_step(MLP, tmp_path), "zero1 2")
    here = train(par, samples, lr=0.1, epochs=2, timeout=TIMEOUT)
    there = train(par, samples, lr=0.1, epochs=2, timeout=TIMEOUT, start_ranks=actors())
    assert len(here) == 4
    assert [r.values for r in there] == [r.values for r in here]
