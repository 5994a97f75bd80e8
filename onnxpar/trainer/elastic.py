"""Training that goes on when ranks die: generations of ranks that are child processes of this
process.

When a rank dies, its generation ends. The next generation loads the newest complete checkpoint,
resharded if there are fewer ranks, and takes the steps after it again, on the same batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxpar.base.errors import InputError, RankError
from onnxpar.runtime.launch.membership import MAX_RESTARTS, Generation, Membership, slots_of
from onnxpar.runtime.ranks.closing import Closing
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.trainer.checkpoint import checkpoints, tell
from onnxpar.trainer.data import Data
from onnxpar.trainer.loop import Record, Run, records
from onnxpar.trainer.step_plans import StepPlans
from onnxpar.trainer.trainer import Trainer

_HERE = "localhost"
"""The host of all slots."""


@dataclass(frozen=True)
class Elastic:
    """How a run goes on when ranks die: the options `--min-ranks`, `--max-restarts` and `--step` of
    `train`."""

    min_ranks: int = 1
    max_restarts: int = MAX_RESTARTS
    step: Path | None = None

    @staticmethod
    def of(
        is_elastic: bool,
        min_ranks: int | None,
        max_restarts: int | None,
        step: str | os.PathLike[str] | None,
        is_profiled: bool,
    ) -> Elastic | None:
        """Returns the options that a user gave; None unless `is_elastic`. Errors: InputError for
        these options without --elastic, or for --elastic with --profile (`is_profiled`)."""
        options = {"min_ranks": min_ranks, "max_restarts": max_restarts, "step": step}
        options = {name: value for name, value in options.items() if value is not None}
        if not is_elastic:
            for name in options:
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"{flag} is for runs with --elastic; give that too")
            return None
        if is_profiled:
            raise InputError("--profile is for the ranks of one generation; leave out --elastic")
        if step is not None:
            options["step"] = Path(step)
        return Elastic(**options)  # type: ignore[arg-type]


class Generations(Closing):
    """The trainers of a run, one after the other: when ranks die, new ranks start with a new
    trainer. Without `elastic`, there is one trainer, and its errors end the run.

    par        the folder of the sharded step
    run        the options of the run
    must_stop  as in `loop.records`
    options    the options of `Trainer`
    trainer    (field) the current trainer

    Errors: those of `Trainer`; InputError if the run cannot be elastic.
    """

    def __init__(
        self,
        par: Path,
        run: Run,
        elastic: Elastic | None,
        must_stop: Callable[[], bool] | None = None,
        **options: Any,
    ) -> None:
        self._par, self._run, self._options = par, run, options
        self._must_stop = must_stop
        self._places = None if elastic is None else _Places(par, run, elastic)
        self.trainer = self._begin()

    def records(self, data: Data, held_out: Data | None = None) -> Iterator[Record]:
        """Yields the records of `loop.records`, one per step. After a rank has died, the steps
        since the last checkpoint are taken again, so that a record's `total` goes back. Errors:
        those of `loop.records`; RankError if too few ranks are left."""
        run = self._run
        while True:
            try:
                yield from records(self.trainer, data, run, held_out, self._must_stop)
                return
            except RankError as error:
                self.trainer.close()
                self._lose(error)
            run = replace(run, resume=True)
            self.trainer = self._begin()

    def close(self) -> None:
        """Ends the ranks."""
        self.trainer.close()

    def _begin(self) -> Trainer:
        """Starts the ranks of the next generation, and returns their trainer. Errors:
        OnnxparError."""
        if self._places is None:
            return Trainer(self._par, **self._options)
        while True:
            par, number = self._places.next()
            logs = self._options.get("log_dir")
            if logs is not None:
                logs = generation_logs(Path(logs), number)
            try:
                return Trainer(par, **{**self._options, "log_dir": logs})
            except RankError as error:
                self._lose(error)

    def _lose(self, error: RankError) -> None:
        """Records the ranks that have died, according to an error. Raises the error if no rank has
        died, or if too few are left."""
        if self._places is None or not error.lost:
            raise error
        self._places.lose(error)


class _Places:
    """The places for ranks on this host, and which sharded step the ranks of a generation run."""

    def __init__(self, par: Path, run: Run, elastic: Elastic) -> None:
        self._folder = checkpoint_folder(run)
        ranks = Bundle.load(par).mesh.size
        slots = slots_of({_HERE: ranks})
        self._members = Membership(slots, elastic.min_ranks, elastic.max_restarts)
        self._generation = Generation(0, ())
        self._par = par
        self._plans: StepPlans | None = None
        if elastic.min_ranks < ranks:
            self._plans = StepPlans(par, self._folder, elastic.step, tell)

    def next(self) -> tuple[Path, int]:
        """Returns the folder of the sharded step for the next generation's ranks, and the
        generation's number. Errors: OnnxparError."""
        members = self._members
        par = self._par
        if self._plans is not None:
            par = self._plans.at_most(len(members.slots), members.min_ranks)
        self._generation = members.begin(Bundle.load(par).mesh.size)
        return par, self._generation.number

    def lose(self, error: RankError) -> None:
        """Records that the ranks which an error names have died, and prints the error with what
        happens next. Raises the error if too few ranks are left."""
        members = self._members
        starts_again = members.lose([self._generation.slots[rank] for rank in error.lost])
        first, *others = str(error).split("\n")
        left = len(members.slots)
        if left < members.min_ranks:
            few = f"ranks left: {left}, fewer than --min-ranks {members.min_ranks}"
            error.args = ("\n".join([f"{first}; {few}", *others]),)
            raise error
        if starts_again:
            how = f"restart {members.restarts} of {members.max_restarts}"
        else:
            how = f"--max-restarts {members.max_restarts} is used up, so {left} ranks go on"
        newest = list(checkpoints(self._folder).values())[-1:]
        tell(f"{first}; {how}, from {newest[0] if newest else 'the beginning'}")


def checkpoint_folder(run: Run) -> Path:
    """Returns the folder of checkpoints of an elastic run. Errors: InputError if the run saves none
    while it goes on."""
    if run.checkpoint is None or not run.every:
        raise InputError(
            "--elastic: a run goes on from its last checkpoint; give --checkpoint DIR and --every N"
        )
    return run.checkpoint


def generation_logs(logs: Path, number: int) -> Path:
    """Returns the folder for the logs of generation `number`, in `logs`; logs of earlier
    generations stay."""
    return logs / f"generation.{number}" if number else logs
