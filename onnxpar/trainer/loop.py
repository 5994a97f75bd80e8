"""A training run: epochs of batches, a learning rate for each step, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onnxpar.errors import DivergenceError, InputError
from onnxpar.ir.training_spec import SKIPPED
from onnxpar.trainer.checkpoint import Progress, checkpoints
from onnxpar.trainer.data import Data
from onnxpar.trainer.rates import Rate
from onnxpar.trainer.trainer import Trainer

_SEEDS = 1 << 31
_STRIDE = 1 << 32
"""Seeds of steps of two runs of different seeds have nothing in common."""


@dataclass(frozen=True)
class Run:
    """What a run is to do.

    every       a checkpoint after so many steps, and at the end; 0: at the end alone
    checkpoint  the folder of checkpoints, None for none
    keep        so many of them are left, the newest; 0: all
    resume      goes on from the newest of them that is whole, if there is any
    """

    epochs: int
    rate: float
    schedule: str = "constant"
    warmup: int = 0
    seed: int = 0
    shuffle: bool = True
    checkpoint: Path | None = None
    every: int = 0
    keep: int = 0
    resume: bool = False


@dataclass(frozen=True)
class Record:
    """One step: numbers of epoch and of the step in it, from 1, the steps in all, and what it
    told."""

    epoch: int
    step: int
    total: int
    rate: float
    seconds: float
    values: dict[str, float]
    evaluation: dict[str, float] | None = None


def records(
    trainer: Trainer, data: Data, run: Run, held_out: Data | None = None
) -> Iterator[Record]:
    """Trains, and yields a record after each step; that of an epoch's last step also says how good
    the model is on held-out data. A step's checkpoint is saved after its record is consumed: a
    killed run has a record of each step that a checkpoint includes. Errors: InputError, ModelError,
    RankError, DivergenceError."""
    if run.epochs < 1:
        raise InputError(f"{run.epochs} epochs: at least 1")
    if not 0 <= run.seed < _SEEDS:
        raise InputError(f"--seed {run.seed}: from 0 to {_SEEDS - 1}")
    if run.every < 0:
        raise InputError(f"a checkpoint every {run.every} steps: 0 is none but the last")
    if run.keep < 0:
        raise InputError(f"--keep {run.keep}: 0 keeps all checkpoints")
    for option, given in (("--every", run.every), ("--keep", run.keep)):
        if given and run.checkpoint is None:
            raise InputError(f"{option} {given}: of which checkpoints? give --checkpoint DIR")
    steps = run.epochs * data.batches
    rate = Rate(run.rate, steps, run.schedule, run.warmup)
    progress = _start(trainer, run)
    while progress.epoch < run.epochs:
        epoch = progress.epoch
        order = run.seed if run.shuffle else None
        for batch in data.epoch(epoch, order, progress.in_epoch):
            at = rate.at(progress.step)
            start = time.perf_counter()
            values = trainer.step(batch, at, run.seed * _STRIDE + progress.step)
            seconds = time.perf_counter() - start
            number = progress.in_epoch + 1
            _check(values[trainer.spec.loss], values, epoch + 1, number)
            progress = progress.behind(data.batches)
            evaluation = None
            if held_out is not None and number == data.batches:
                evaluation = evaluate(trainer, held_out)
            yield Record(epoch + 1, number, progress.step, at, seconds, values, evaluation)
            is_due = progress.step == steps or (run.every and progress.step % run.every == 0)
            if run.checkpoint is not None and is_due:
                trainer.save(run.checkpoint, progress)
                if run.keep:
                    trainer.keep(run.checkpoint, progress, run.keep)


def _check(loss: float, values: dict[str, float], epoch: int, step: int) -> None:
    """Errors: DivergenceError where the loss is no number, and went into the parameters."""
    if not math.isfinite(loss) and not values.get(SKIPPED):
        raise DivergenceError(
            f"epoch {epoch}, step {step}: the loss is {loss}; take a lower --lr or a longer "
            "--warmup, or write the step with --clip-norm, and go on from an earlier checkpoint"
        )


def evaluate(trainer: Trainer, data: Data) -> dict[str, float]:
    """How good the model is on whole batches of data: means over them, by metric."""
    told = [trainer.evaluate(batch) for batch in data.epoch(0, None)]
    return {name: sum(t[name] for t in told) / len(told) for name in told[0]}


def _has_checkpoint(folder: Path, may: bool) -> bool:
    """Whether a folder has any checkpoint, whole or not. Errors: InputError where it may not."""
    each = list(checkpoints(folder).values())
    if each and not may:
        raise InputError(
            f"{each[-1]}: is of an earlier run; go on from it with --resume, or choose another "
            "folder with --checkpoint"
        )
    return bool(each)


def _start(trainer: Trainer, run: Run) -> Progress:
    """Loads the newest whole checkpoint where a run is to go on; a new one must not mix its own
    with those of another."""
    if run.resume and run.checkpoint is None:
        raise InputError("--resume: from which folder? give --checkpoint DIR")
    if run.checkpoint is None:
        return Progress(seed=run.seed)
    folder = run.checkpoint
    trainer.hold(folder)
    if not trainer.together.first(lambda: _has_checkpoint(folder, run.resume)):
        return Progress(seed=run.seed)
    checkpoint = trainer.find(folder)
    found = checkpoint.path
    if checkpoint.progress.seed != run.seed:
        raise InputError(
            f"{found}: is of a run with seed {checkpoint.progress.seed}, this one has {run.seed}: "
            "its batches would come in another order"
        )
    trainer.load(checkpoint)
    return checkpoint.progress
