"""The training loop: epochs of batches, with a learning rate for each step, and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

from onnxpar.base.arrays import Array
from onnxpar.base.errors import DivergenceError, InputError, StoppedError
from onnxpar.graph.training_spec import IGNORED
from onnxpar.trainer.checkpoint import Progress, Settings, checkpoints, tell, warn
from onnxpar.trainer.data import Data
from onnxpar.trainer.epochs import batches, check_same, with_ends
from onnxpar.trainer.rates import CONSTANT, ENDING, Rate, Schedule, check_rate
from onnxpar.trainer.trainer import Trainer

_SEEDS = 1 << 31
_STRIDE = 1 << 32
"""The seed of a step is the run's seed times this factor, plus the step's number; so runs with
different seeds never use the same seed for a step."""


@dataclass(frozen=True)
class Run:
    """The options of a training run: options of `TrainOptions` by the same names; `rate`, the
    (peak) learning rate; and `schedule`, which says how the rate rises and falls. Errors:
    InputError for an option that no run can have."""

    epochs: int | None
    rate: float
    schedule: Schedule = CONSTANT
    seed: int = 0
    shuffle: bool = True
    checkpoint: Path | None = None
    every: int = 0
    keep: int = 0
    resume: bool = False
    async_checkpoint: bool = False
    allow_changed: bool = False
    patience: int = 0
    keep_best: bool = False
    max_steps: int | None = None

    def __post_init__(self) -> None:
        """Checks the options as far as this needs neither the data nor the step."""
        for option, number in (("--epochs", self.epochs), ("--max-steps", self.max_steps)):
            if number is not None and number < 1:
                raise InputError(f"{option} {number}: must be at least 1")
        check_rate(self.rate)
        if not 0 <= self.seed < _SEEDS:
            raise InputError(f"--seed {self.seed}: must be from 0 to {_SEEDS - 1}")
        if self.every < 0:
            raise InputError(
                f"--every {self.every}: give the number of steps between checkpoints, or 0 to save "
                "one at the end only"
            )
        if self.patience < 0:
            raise InputError(f"--patience {self.patience}: give a number of evaluations, or 0")
        if self.keep < 0:
            raise InputError(
                f"--keep {self.keep}: give the number of checkpoints to keep, or 0 to keep all"
            )
        if self.checkpoint is None:
            for option, given in (("--every", self.every), ("--keep", self.keep)):
                if given:
                    raise InputError(
                        f"{option} {given}: this run saves no checkpoints; give --checkpoint DIR"
                    )
            flags = (
                ("--resume", self.resume),
                ("--async-checkpoint", self.async_checkpoint),
                ("--allow-changed", self.allow_changed),
                ("--keep-best", self.keep_best),
            )
            for option, is_given in flags:
                if is_given:
                    raise InputError(
                        f"{option}: the folder of checkpoints is not given; give --checkpoint DIR"
                    )

    def check_evaluation(self, is_given: bool) -> None:
        """Checks that a run whose options are about evaluations has data for them (`is_given`).
        Errors: InputError."""
        for option, needs in (("--patience", self.patience), ("--keep-best", self.keep_best)):
            if needs and not is_given:
                raise InputError(f"{option} is about the loss of an evaluation; give --eval, too")

    @property
    def passes(self) -> float:
        """Number of passes over all samples after which the run ends, at the latest; inf if only
        `max_steps` ends it."""
        if self.epochs is None:
            return 1 if self.max_steps is None else inf
        return self.epochs

    def steps(self, data: Data, done: Progress) -> int | None:
        """Returns the number of all steps of the run, including the steps before `done`; None if
        only its end tells."""
        left, each = data.left(done.samples), data.batches
        if left is None or each is None or self.passes == inf:
            return self.max_steps
        more = int(self.passes) - done.epoch
        total = done.step + (left + (more - 1) * each if more > 0 else 0)
        return total if self.max_steps is None else min(total, max(self.max_steps, done.step))

    def is_over(self, progress: Progress) -> bool:
        """True if the run takes no step after this progress."""
        return self.has_ended(progress) or self.has_stalled(progress)

    def has_ended(self, progress: Progress) -> bool:
        """True if all epochs or all steps of the run are done."""
        is_last = self.max_steps is not None and progress.step >= self.max_steps
        return is_last or progress.epoch >= self.passes

    def has_stalled(self, progress: Progress) -> bool:
        """True if the last `patience` evaluations have not had a lower loss than before."""
        return bool(self.patience) and progress.worse >= self.patience


@dataclass(frozen=True)
class Record:
    """One step of a run, as the loop reports it.

    epoch       number of the epoch, from 1
    step        number of the step in its epoch, from 1
    total       number of steps so far
    rate        learning rate of the step
    seconds     time of the step
    values      the loss before the update, and other metrics, by name
    evaluation  metrics on held-out data after the last step of an epoch, and of the run; else None
    best_step   the step after which an evaluation had the least loss so far; 0 if there is none
    """

    epoch: int
    step: int
    total: int
    rate: float
    seconds: float
    values: dict[str, float]
    evaluation: dict[str, float] | None = None
    best_step: int = 0

    def lines(self, loss: str) -> list[str]:
        """Returns the lines that a run prints for the step, in MindSpore's form, with the number of
        the step in the run, which the names of checkpoints have. `loss` is the name of the loss
        among the values."""
        value = f"loss is {self.values[loss]:.6g}"
        lines = [f"epoch: {self.epoch} step: {self.step}, {value} (step {self.total} of the run)"]
        if self.evaluation is not None:
            each = ", ".join(f"{name} is {value:.6g}" for name, value in self.evaluation.items())
            lines.append(f"epoch: {self.epoch} evaluation: {each}")
        return lines


def records(
    trainer: Trainer,
    data: Data,
    run: Run,
    held_out: Data | None = None,
    must_stop: Callable[[], bool] | None = None,
) -> Iterator[Record]:
    """Trains, and yields a record after each step. The record of an epoch's last step has an
    evaluation on `held_out`, if given. The lines of each record also go to the ranks' logs.

    A checkpoint is saved only when the caller asks for the next record, so that a killed run has a
    record of each step that a checkpoint includes. After a step in which `must_stop` returns True
    on any rank, a checkpoint is saved, and the run ends.

    Errors: InputError, ModelError, RankError, DivergenceError; StoppedError if the run had to stop.
    """
    run.check_evaluation(held_out is not None)
    together = trainer.together
    if together.size > 1:
        check_same(together, [each and each.digest for each in (data, held_out)])
    progress = _start(trainer, run, data)
    rate = Rate(run.rate, run.steps(data, progress), run.schedule)
    if trainer.leads:
        _tell_start(run, data, progress)
    applied, first = 0, progress.step
    while not run.is_over(progress):
        epoch = progress.epoch
        order = run.seed if run.shuffle else None
        before = progress
        for batch, is_last in with_ends(batches(together, data, epoch, order, progress.samples)):
            at = rate.at(progress.step)
            start = time.perf_counter()
            number = -(-progress.samples // data.batch) + 1
            with _named(trainer, batch, f"epoch {epoch + 1}, step {number}"):
                values = trainer.step(batch, at, run.seed * _STRIDE + progress.step)
            seconds = time.perf_counter() - start
            if trainer.problem and trainer.leads:
                warn(f"epoch {epoch + 1}, step {number}: {trainer.problem}: nothing was updated")
            applied += not trainer.problem
            samples = progress.samples + data.batch
            progress = replace(progress, step=progress.step + 1, samples=samples)
            if is_last:
                progress = progress.after_epoch()
            evaluation, is_best = None, False
            if held_out is not None and (is_last or run.has_ended(progress)):
                evaluation = evaluate(trainer, held_out)
                progress = progress.after_evaluation(evaluation["loss"])
                is_best = progress.best_step == progress.step
            record = Record(
                *(epoch + 1, number, progress.step, at, seconds, values),
                evaluation,
                progress.best_step,
            )
            trainer.session.write_log(record.lines(trainer.spec.loss))
            yield record
            is_due = run.is_over(progress) or (run.every and progress.step % run.every == 0)
            is_due = is_due or (run.keep_best and is_best)
            stops = must_stop is not None and any(trainer.together.each(must_stop()))
            if is_due or stops:
                _save(trainer, run, progress)
            if stops:
                _finish_save(trainer, run)
                raise StoppedError(f"the run was asked to end; {last_checkpoint(run)}")
            if run.has_ended(progress):
                break
        if progress is before:  # after a change of batch size, none may be full
            progress = _after_nothing(progress)
    if run.has_stalled(progress) and trainer.leads:
        tell(
            f"the run ends, because {progress.worse} evaluations in a row have no lower loss than "
            f"that after step {progress.best_step}"
        )
    _finish_save(trainer, run)
    if not applied and progress.step > first:
        raise DivergenceError(
            f"no step of the run was applied: {trainer.problem}; look at the samples, give a lower "
            "--lr or a longer --warmup, or write the step again with --clip-norm"
        )


def _tell_start(run: Run, data: Data, progress: Progress) -> None:
    """Prints a line, if a run that resumes from `progress` has nothing left to do, or must first
    read and skip the samples that it took before."""
    nothing = f"nothing to do: {run.checkpoint} has"
    if run.max_steps is not None and progress.step >= run.max_steps:
        steps = f"{progress.step} of --max-steps {run.max_steps}"
        warn(f"{nothing} taken step {steps}; raise --max-steps")
    elif progress.epoch >= run.passes:
        epochs = f"{progress.epoch} of --epochs {run.passes}"
        warn(f"{nothing} finished epoch {epochs}; raise --epochs")
    elif progress.samples and data.count is None:
        tell(
            f"the first {progress.samples} samples of epoch {progress.epoch + 1} are read again "
            "and skipped, because the run has taken them"
        )


def _after_nothing(progress: Progress) -> Progress:
    """Returns the progress after an epoch that had no batch left. Errors: InputError if the epoch
    had no batch at all."""
    if not progress.samples:
        raise InputError(
            f"epoch {progress.epoch + 1} of the data has no batch; give an iterable that each "
            "epoch can read anew, or a function that makes it"
        )
    return progress.after_epoch()


def _save(trainer: Trainer, run: Run, progress: Progress) -> None:
    """Saves a checkpoint and removes old ones; with `async_checkpoint`, only begins to save. Does
    nothing if the run saves no checkpoints."""
    if run.checkpoint is None:
        return
    if run.async_checkpoint:
        _finish_save(trainer, run)
        trainer.async_save(run.checkpoint, progress)
        return
    trainer.save(run.checkpoint, progress)
    _keep(trainer, run, progress)


def _finish_save(trainer: Trainer, run: Run) -> None:
    """Waits for the checkpoint that is still being written, if there is one, and then removes old
    ones."""
    finished = trainer.finish_save()
    if finished is not None:
        _keep(trainer, run, finished)


def _keep(trainer: Trainer, run: Run, progress: Progress) -> None:
    """Removes old checkpoints, if the run keeps only some."""
    if run.checkpoint is not None and run.keep:
        best = Progress(progress.best_step).name
        trainer.keep(run.checkpoint, progress, run.keep, (best,) if run.keep_best else ())


@contextmanager
def _named(trainer: Trainer, batch: Mapping[str, Array], step: str) -> Iterator[None]:
    """Adds the step's name (`step`) and a remedy to a DivergenceError in the block. Raises
    InputError instead if no label of the batch counts."""
    try:
        yield
    except DivergenceError as error:
        labels = batch.get(trainer.spec.labels or "")
        if labels is not None and (labels == IGNORED).all():
            raise InputError(
                f"{step}: the batch has no label: all of {trainer.spec.labels!r} are {IGNORED}, "
                "which does not count; leave such samples out, or give larger batches with "
                "`onnxpar grad --dim` or --accumulate"
            ) from None
        raise DivergenceError(
            f"{step}: {error}, and nothing was updated; look at the samples of this step, resume "
            "from an earlier checkpoint with a lower --lr or a longer --warmup, or write the step "
            "again with --clip-norm"
        ) from None


def evaluate(trainer: Trainer, data: Data) -> dict[str, float]:
    """Returns the metrics of the model on held-out data, by name: means over all labels that count.
    Errors: InputError if none counts."""
    measured = [trainer.measure(batch) for batch in batches(trainer.together, data, 0, None)]
    if not measured:
        raise InputError("--eval: the data has no batch; give an iterable with samples")
    means = {}
    for name in measured[0]:
        parts = [each[name] for each in measured if each[name][1]]
        if not parts:
            raise InputError(f"--eval: every label is {IGNORED}, which does not count; give labels")
        means[name] = sum(mean * weight for mean, weight in parts) / sum(w for _, w in parts)
    return means


def last_checkpoint(run: Run, goes_on: bool = False) -> str:
    """Returns a sentence that says where the newest checkpoint of a stopped run is and, unless the
    run goes on by itself (`goes_on`), how to continue."""
    if run.checkpoint is None:
        return "there is no checkpoint, because --checkpoint is not given"
    newest = list(checkpoints(run.checkpoint).values())[-1:]
    if newest:
        how = "" if goes_on else "; continue from it with --resume"
        return f"the last checkpoint is {newest[0]}{how}"
    every = f"after {run.every} steps" if run.every else "at the end; give --every N to save more"
    return f"there is no checkpoint yet: the first is saved {every}"


def _has_checkpoint(folder: Path, may: bool) -> bool:
    """True if a folder has a checkpoint, complete or damaged. Errors: InputError if it has one, and
    the run may not continue it (`may` is False)."""
    each = list(checkpoints(folder).values())
    if each and not may:
        raise InputError(
            f"{each[-1]} belongs to an earlier run; continue that run with --resume, or choose "
            "another folder with --checkpoint"
        )
    return bool(each)


def _settings(run: Run, data: Data) -> Settings:
    """Returns the settings of a run, which its checkpoints record so that a later run can compare
    them."""
    order = data.batch, data.count, data.digest, run.shuffle, run.seed
    ends = run.schedule.kind in ENDING
    epochs = int(run.passes) if ends and run.passes < inf else None
    return Settings(*order, asdict(run.schedule), epochs, run.max_steps if ends else None)


def _start(trainer: Trainer, run: Run, data: Data) -> Progress:
    """Locks the folder of checkpoints, loads the newest complete checkpoint if the run resumes, and
    returns the progress to start from. Errors: InputError for a new run if the folder has
    checkpoints of another run, or if the run that resumes has other settings."""
    if run.checkpoint is None:
        return Progress()
    folder = run.checkpoint
    trainer.hold(folder)
    settings = _settings(run, data)
    if not trainer.together.first(lambda: _has_checkpoint(folder, run.resume)):
        return Progress(settings=settings)
    checkpoint = trainer.find(folder)
    before = checkpoint.progress.settings
    changed = before.differences(settings) if before is not None else []
    if changed and not run.allow_changed:
        raise InputError(
            f"{checkpoint.path} belongs to another run: {'; '.join(changed)}; give what that run "
            "had, or --allow-changed to go on with what is given now"
        )
    trainer.load(checkpoint, run.allow_changed)
    return replace(checkpoint.progress, settings=settings)
