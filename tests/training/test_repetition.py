"""The same command twice leaves the same bits, whether ranks are threads or processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from training.models import DROPOUT
from training.steps import Array, ThreadTrainer, batches, shard, write_step
from training.trajectories import expected, write_descent

from onnxpar.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("medium")

STEPS = 20


def leave(trainer: Trainer, feeds: list[dict[str, Array]], rate: float) -> dict[str, bytes]:
    """The losses and all that is left of so many steps."""
    with trainer:
        told = [trainer.run([trainer.spec.loss], b, rate, i) for i, b in enumerate(feeds)]
        states = trainer.session.states
        left = {name: states.read(name).tobytes() for name in states.names}
    return {**left, "losses": b"".join(loss.tobytes() for (loss,) in told)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor-parallel 4", "zero3 4"])
def test_dropout(layout: str, tmp_path: Path) -> None:
    told = []
    for name, trainer in (("one", ThreadTrainer), ("other", ThreadTrainer), ("more", Trainer)):
        (tmp_path / name).mkdir()
        par, plan = shard(write_step(DROPOUT, tmp_path / name, optimizer="adam"), layout)
        told.append(leave(trainer(par), list(batches(plan, STEPS)), 0.01))
    assert told[0] == told[1] == told[2]
    assert len({*told[0]}) == 1 + 1 + 3 * 2


@pytest.mark.slow
def test_a_model_on_a_mesh(tmp_path: Path) -> None:
    how = expected("gpt2")
    told = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        par, _ = shard(write_descent("gpt2", tmp_path / name), "zero3 dp=2,tp=2")
        told.append(leave(ThreadTrainer(par), [how.batch] * STEPS, how.rate))
    assert told[0] == told[1]
