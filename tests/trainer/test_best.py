"""Runs that end when evaluations no longer improve, and that keep the best checkpoint."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.steps import MLP, Array, ThreadTrainer, same, shard, states, write_step

from onnxpar.base.errors import InputError, StoppedError
from onnxpar.trainer import elastic
from onnxpar.trainer.checkpoint import Checkpoint, Progress, checkpoints
from onnxpar.trainer.living import living
from onnxpar.trainer.loop import Record, Run, records

EPOCHS = 12
BATCHES = 2
RUN = Run(EPOCHS, 0.1)


def samples(seed: int) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((16, 6)).astype(np.float32)
    return {"x": x, "labels": draw.integers(0, 5, 16)}


@pytest.fixture(scope="module")
def par(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The step of a model that soon overfits random labels."""
    folder = tmp_path_factory.mktemp("best")
    return shard(write_step(MLP, folder, optimizer="adam"), "zero2 2")[0]


def train(par: Path, run: Run) -> tuple[list[Record], dict[str, Array]]:
    with ThreadTrainer(par) as trainer:
        data, held_out = (trainer.batches_of(samples(seed)) for seed in (0, 1))
        told = list(records(trainer, data, run, held_out))
        return told, states(trainer)


def evaluations(told: list[Record]) -> list[float]:
    return [r.evaluation["loss"] for r in told if r.evaluation is not None]


@pytest.fixture(scope="module")
def whole(par: Path) -> list[Record]:
    return train(par, RUN)[0]


@pytest.mark.parametrize("patience", [1, 3])
def test_a_run_ends_when_evaluations_do_not_improve(
    patience: int, par: Path, whole: list[Record], tmp_path: Path
) -> None:
    losses = evaluations(whole)
    ends = next(
        n
        for n in range(len(losses))
        if n >= patience
        and min(losses[: n + 1 - patience]) <= min(losses[n + 1 - patience : n + 1])
    )
    assert ends < EPOCHS - 1
    folder = tmp_path / "c"
    told, _ = train(par, replace(RUN, patience=patience, checkpoint=folder))
    assert evaluations(told) == losses[: ends + 1]
    assert list(checkpoints(folder)) == [told[-1].total]
    again, _ = train(par, replace(RUN, patience=patience, checkpoint=folder, resume=True))
    assert again == []


def test_a_resumed_run_remembers_its_evaluations(
    par: Path, whole: list[Record], tmp_path: Path
) -> None:
    best = int(np.argmin(evaluations(whole))) + 1
    patience = 3
    cut = replace(RUN, epochs=best + 1, patience=patience, checkpoint=tmp_path / "c")
    train(par, cut)
    told, _ = train(par, replace(cut, epochs=EPOCHS, resume=True))
    assert evaluations(told) == evaluations(whole)[best + 1 : best + patience]


@pytest.mark.parametrize("how", [{}, {"async_checkpoint": True}])
def test_the_best_checkpoint_is_kept(
    how: dict[str, Any], par: Path, whole: list[Record], tmp_path: Path
) -> None:
    """Beside the newest ones, with the states of a run that ends there."""
    folder = tmp_path / "c"
    told, _ = train(par, replace(RUN, checkpoint=folder, every=3, keep=2, keep_best=True, **how))
    best = (int(np.argmin(evaluations(whole))) + 1) * BATCHES
    assert told[-1].best_step == best
    assert list(checkpoints(folder)) == [best, 21, 24]
    expected = train(par, replace(RUN, epochs=best // BATCHES))[1]
    found = Checkpoint.load(folder / Progress(best).name)
    same({n: found.states.read(n) for n in expected}, expected)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"patience": -1}, "--patience -1: give a number of evaluations"),
        ({"keep_best": True}, "--keep-best: the folder of checkpoints is not given"),
    ],
)
def test_options_that_cannot_be(how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(RUN, **how)


def test_without_an_evaluation(par: Path) -> None:
    with ThreadTrainer(par) as trainer:
        run = replace(RUN, patience=1)
        with pytest.raises(InputError, match=r"--patience .* evaluation; give --eval"):
            next(records(trainer, trainer.batches_of(samples(0)), run))


def test_a_run_that_is_terminated_saves_a_checkpoint(
    par: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --every, and without --elastic; a resumed run ends as one that was not."""
    monkeypatch.setattr(elastic, "Trainer", lambda par, held=None: ThreadTrainer(par))
    run = replace(RUN, epochs=3, checkpoint=tmp_path / "c")
    with (
        pytest.raises(StoppedError, match=r"asked to end; the last checkpoint is .*step_00000003"),
        living(par, run, None, None) as generations,
    ):
        for record in generations.records(generations.trainer.batches_of(samples(0))):
            if record.total == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert list(checkpoints(tmp_path / "c")) == [3]
    left = train(par, replace(run, resume=True))[1]
    same(left, train(par, replace(run, checkpoint=None))[1])
