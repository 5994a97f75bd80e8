"""Starts the ranks of a training run: of one generation or, if the run is elastic, of one
generation after the other when ranks die."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnxpar.base.folder_lock import FolderLock
from onnxpar.base.interrupts import Deferred
from onnxpar.runtime.launch.launch import launched_rank
from onnxpar.trainer.elastic import Elastic, Generations
from onnxpar.trainer.launched_generation import LaunchedGeneration, launched_generation
from onnxpar.trainer.loop import Run
from onnxpar.trainer.trainer import held_by_first


@contextmanager
def held_unless_launched(run: Run, elastic: Elastic | None) -> Iterator[FolderLock | None]:
    """Locks the folder of checkpoints as `held_by_first` does, and yields the lock. The ranks of an
    elastic run under a launcher lock it later, together; then yields None. Errors: those of
    `held_by_first`."""
    is_later = elastic is not None and launched_rank() is not None
    with held_by_first(None if is_later else run.checkpoint) as held:
        yield held


@contextmanager
def living(
    par: Path, run: Run, elastic: Elastic | None, held: FolderLock | None, **options: Any
) -> Iterator[Generations | LaunchedGeneration]:
    """Starts the ranks of a run, or joins them under a launcher, and ends them after the block. In
    the block, SIGTERM makes a run that saves checkpoints save one and end (StoppedError).

    par      the folder of the sharded step
    run      the options of the run
    elastic  how the run goes on when ranks die; None: it ends
    held     the lock of `held_unless_launched`
    options  the options of `Trainer`

    Errors: those of `Generations` and `launched_generation`.
    """
    launched = launched_rank()
    if elastic is not None and launched is not None:
        with launched_generation(par, run, elastic, launched, **options) as generation:
            yield generation
    elif run.checkpoint is not None:
        with (
            Deferred() as stop,
            Generations(par, run, elastic, stop.asked.is_set, held=held, **options) as generations,
        ):
            yield generations
    else:
        with Generations(par, run, elastic, **options) as generations:
            yield generations
