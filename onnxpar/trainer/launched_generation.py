"""One generation of an elastic run, in a process that is one of its ranks. The launcher, which
outlives the ranks, starts the next generation (`runtime/launch/supervision.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxpar.base.errors import OnnxparError, StrategyError
from onnxpar.base.folder_lock import FolderLock
from onnxpar.base.interrupts import Deferred
from onnxpar.runtime.launch.launch import Launched, generation_number
from onnxpar.runtime.ranks.collectives import gather_bytes
from onnxpar.runtime.ranks.groups import World
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.trainer.checkpoint import check_seen, tell
from onnxpar.trainer.data import Data
from onnxpar.trainer.elastic import Elastic, checkpoint_folder
from onnxpar.trainer.loop import Record, Run, records
from onnxpar.trainer.step_plans import StepPlans
from onnxpar.trainer.together import Together
from onnxpar.trainer.trainer import Trainer

_PREPARING = 1800.0
"""Most seconds that ranks wait for rank 0, which may shard the step for them. If it dies, they
notice at once."""
_LOST_HOST = 150.0
"""Seconds to wait for the lock of a folder in a generation that is not the first: NFS frees the
locks of a lost host after 90."""


class NotNeededError(OnnxparError):
    """This rank is left over: the step is sharded for fewer ranks than were started."""


@dataclass(frozen=True)
class LaunchedGeneration:
    """The trainer of one rank of an elastic run under a launcher; it has the interface of
    `Generations`."""

    trainer: Trainer
    run: Run
    must_stop: Callable[[], bool]

    def records(self, data: Data, held_out: Data | None = None) -> Iterator[Record]:
        """Yields the records of `loop.records`, one per step. Errors: those of `loop.records`."""
        return records(self.trainer, data, self.run, held_out, self.must_stop)


@contextmanager
def launched_generation(
    par: Path, run: Run, elastic: Elastic, launched: Launched, **options: Any
) -> Iterator[LaunchedGeneration]:
    """Joins the ranks of this generation, with a step that is sharded for as many ranks. In the
    block, SIGTERM makes the run save a checkpoint and end.

    par       the folder of the sharded step, for any number of ranks
    run       the options of the run
    elastic   how the run goes on when ranks die
    launched  the rank of this process
    options   the options of `Trainer`

    Errors: those of `Trainer`; InputError if the run cannot be elastic; NotNeededError.
    """
    folder = checkpoint_folder(run)
    with Deferred() as stop, ExitStack() as locks:
        lock: list[FolderLock] = []

        def prepare() -> str:
            patience = _LOST_HOST if generation_number() else 0.0
            lock.append(locks.enter_context(FolderLock(folder, patience)))
            return os.fspath(_for_ranks(launched.size, par, folder, elastic))

        own = _agreed(launched, par, prepare)
        run = replace(run, resume=run.resume or generation_number() > 0)
        held = lock[0] if lock else None
        with Trainer(own, held=held, **options) as trainer:
            yield LaunchedGeneration(trainer, run, stop.asked.is_set)


def _for_ranks(ranks: int, par: Path, folder: Path, elastic: Elastic) -> Path:
    """Returns the folder of the step that is sharded for `ranks` ranks, or for fewer. Shards the
    step again if there is none. Errors: OnnxparError."""
    if ranks < elastic.min_ranks:
        raise StrategyError(
            f"{ranks} processes were started, fewer than --min-ranks {elastic.min_ranks}"
        )
    if ranks == Bundle.load(par).mesh.size:
        return par
    return StepPlans(par, folder, elastic.step, tell).at_most(ranks, elastic.min_ranks)


def _agreed(launched: Launched, par: Path, prepare: Callable[[], str]) -> Path:
    """Calls `prepare` on rank 0, and returns the folder that it returns there on all ranks: `par`,
    or a folder that all hosts see. If the step in it is for fewer ranks than were started, sets
    this process's number of ranks.

    Errors: NotNeededError if this rank is left over; OnnxparError.
    """
    rank, size, store = launched.rank, launched.size, launched.store
    with World.create("elastic", rank, size, store, launched.bind_address, _PREPARING) as world:
        together = Together(rank, size, lambda payload: gather_bytes(world, payload, "plan"))
        own = Path(together.first(prepare))
        needed: int = together.first(lambda: Bundle.load(own).mesh.size)
        if own != par:  # else ranks fetch what they lack
            plan = own / "plan.json"
            check_seen(lambda: "" if plan.is_file() else f"it does not see {plan}", together)
    if rank >= needed:
        raise NotNeededError(f"rank {rank} is not needed: {own} is for {needed} ranks")
    if needed < size:
        os.environ["ONNXPAR_RANK"], os.environ["ONNXPAR_WORLD_SIZE"] = str(rank), str(needed)
        os.environ["ONNXPAR_STORE"] = store
    return own
