"""Takes training steps with a sharded training step; parameters and optimizer state stay on their
ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import DivergenceError, InputError, ModelError, RankError
from onnxpar.base.folder_lock import NAME as LOCK
from onnxpar.base.folder_lock import FolderLock
from onnxpar.graph.training_spec import (
    EVALUATION,
    FROZEN,
    IN_MODEL,
    MAGNITUDES,
    RESIDUAL,
    SKIPPED,
    WEIGHT,
    Slot,
    Step,
)
from onnxpar.runtime.launch.launch import launched_rank
from onnxpar.runtime.ranks.closing import Closing
from onnxpar.runtime.session.bundle import NodeArg
from onnxpar.runtime.session.checks import check_array
from onnxpar.runtime.session.open_session import open_session
from onnxpar.runtime.session.session import InferenceSession
from onnxpar.trainer.checkpoint import (
    Checkpoint,
    Progress,
    check_seen,
    checkpoints,
    damage,
    load_together,
    tell,
    warn,
)
from onnxpar.trainer.data import Data, Rest
from onnxpar.trainer.iterables import Samples
from onnxpar.trainer.pending_checkpoint import PendingCheckpoint
from onnxpar.trainer.together import Together
from onnxpar.trainer.write_checkpoint import begin, discard, finish, remove

_MOMENT = 0.5
"""Seconds between two exchanges of processes that wait for a checkpoint."""
_CLOSING = 10.0
"""Seconds that a checkpoint gets to be completed when its trainer closes."""


class Trainer(Closing):
    """A session of a sharded training step (`onnxpar shard step.onnx`), which takes steps,
    evaluates, and saves and loads checkpoints.

    par      the folder of the sharded step
    held     the lock of a checkpoint folder, if the caller has locked it already
    options  the options of `InferenceSession`

    A trainer locks each folder to which it saves, until `close`. Errors: ModelError if `par` is not
    a sharded training step.
    """

    def __init__(
        self, par: str | os.PathLike[str], *, held: FolderLock | None = None, **options: Any
    ) -> None:
        self.checkpoint: Path | None = None
        """The checkpoint that this trainer saved or loaded last."""
        self.steps = 0
        """The number of steps that were taken, with those before the checkpoint that was loaded."""
        self.problem = ""
        """Why the last step changed no state; "" if it did."""
        self._restored: frozenset[str] = frozenset()
        """The frozen weights of the loaded checkpoint, which later checkpoints therefore have,
        too."""
        self._is_whole: dict[Path, bool] = {}
        self._held: set[Path] = set()
        self._locks: list[FolderLock] = []
        self._given = held
        self._pending: PendingCheckpoint | None = None
        """On rank 0, the pending checkpoint that `async_save` began last."""
        self._unfinished: tuple[Path, Progress] | None = None
        """The folder and the progress of that checkpoint, until `finish_save`."""
        self.spec: Step
        self.session, (self.bundle, self.spec) = open_session(
            InferenceSession,
            par,
            lambda bundle: (bundle, check_step(bundle.step, bundle.inputs, par)),
            **options,
        )
        rank = launched_rank()
        place = (rank.rank, rank.size) if rank is not None else (0, 1)
        self.together = Together(*place, self.session.exchange)

    @property
    def leads(self) -> bool:
        """True if this process is rank 0, which prints and writes for all."""
        return self.together.leads

    @property
    def data(self) -> list[NodeArg]:
        """The inputs for which a batch needs arrays. For a step for several lengths, with the
        longest shapes."""
        ports = [self.bundle.inputs[name] for name in self.spec.data]
        longest = self._lengths[-1] if self._lengths else {}
        return [replace(p.arg, shape=list(longest.get(p.name, p.arg.shape))) for p in ports]

    @cached_property
    def _lengths(self) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of the data inputs in each program of a step for several lengths, the shortest
        first; empty for any other step."""
        bundle = self.bundle
        lengths = []
        for sizes in bundle.programs:
            at = dict(zip(bundle.symbols, sizes, strict=True))
            shapes = {name: bundle.inputs[name].shape_at(at) for name in self.spec.data}
            lengths.append({n: tuple(size or 0 for size in shape) for n, shape in shapes.items()})
        return lengths

    def batches_of(
        self, data: Samples, trains: bool = True, pad: Mapping[str, float] | None = None
    ) -> Data:
        """Returns samples as batches.

        data    a file or folder, arrays by input name, or an iterable or function of samples or
                batches, as in `train`
        trains  True for training, False for evaluation
        pad     by input, the value that fills samples which are shorter than the step's

        Errors: InputError.
        """
        rest = Rest.of(self.spec, trains)
        options = self.spec.batch, rest, pad, self.spec.labels, self._lengths
        batches = Data.of(data, self.data, *options)
        self._check_labels(batches.arrays)
        return batches

    def _check_labels(self, arrays: Mapping[str, Array]) -> None:
        """Checks the labels among the arrays (by input name). Errors: InputError for a label that
        is no class; onnxruntime would take -1 for the last class."""
        for lookup in self.bundle.lookups:
            labels = None if lookup.table else arrays.get(lookup.input)
            fault = None if labels is None else lookup.fault(np.asarray(labels))
            if fault is not None:
                raise InputError(fault)

    def step(
        self, batch: Mapping[str, Array], rate: float, seed: int | None = None
    ) -> dict[str, float]:
        """Takes one step on a global batch at learning rate `rate`. Returns the loss before the
        update, and other metrics, by name. `seed` decides the random numbers of the step; by
        default, it is the number of steps before, so that each step has others.

        If a parameter would not be finite, all states stay as before the step: the metric `skipped`
        is 1, and `problem` says why. Errors: InputError, RankError; DivergenceError if the loss is
        not finite, unless a dynamic loss scale adapts to that; all states are then as before, too.
        """
        names = [self.spec.loss, *self.spec.metrics]
        values = self.run(names, batch, rate, seed)
        metrics = dict(zip(names, map(float, values), strict=True))
        if not isfinite(metrics[self.spec.loss]) and not metrics.get(SKIPPED):
            raise DivergenceError(self.problem)
        return {**metrics, SKIPPED: 1.0} if self.problem else metrics

    def run(
        self, names: Sequence[str], batch: Mapping[str, Array], rate: float, seed: int | None = None
    ) -> list[Array]:
        """Takes one step, and returns the outputs `names` as global arrays. Without a `seed`, the
        number of the step is the seed. If the loss or a parameter is not finite, the states stay as
        before, and `problem` says why; unlike `step`, this does not raise. Errors: InputError,
        RankError."""
        port = self.bundle.inputs[self.spec.rate]
        feeds = {**self._fed(batch), self.spec.rate: np.asarray(rate, port.dtype)}
        if self.spec.seed is not None:
            feeds[self.spec.seed] = np.asarray(self.steps if seed is None else seed, np.int64)
        flags = [name for name in self.spec.metrics if name == SKIPPED]
        flags += [MAGNITUDES] if self.spec.magnitudes else []
        every = list(dict.fromkeys([*names, self.spec.loss, *flags]))
        values = dict(zip(every, self.session.run(every, feeds, keep_states=True), strict=True))
        self.steps += 1
        self.problem = self._problem(values)
        if self.problem and not values.get(SKIPPED):  # then the graph itself keeps the states
            self.session.states.undo()
        return [values[name] for name in names]

    def _problem(self, values: Mapping[str, Array]) -> str:
        """Returns the reason why a step must not change the states, from its outputs by name; "" if
        it may."""
        if values.get(SKIPPED):
            return "gradients are not finite"
        if not isfinite(loss := float(values[self.spec.loss])):
            return f"the loss is {loss}"
        lengths = zip(self.spec.magnitudes, values.get(MAGNITUDES, ()), strict=True)
        odd = [name for name, length in lengths if not isfinite(length)]
        return f"the update of {_first(odd, 'of ', 'parameter')} is not finite" if odd else ""

    def _fed(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        """Returns a batch with a value for the input that has the number of samples that count, if
        the step has such an input and the batch lacks it: all count. Errors: InputError."""
        self._check_labels(batch)
        name = self.spec.samples
        if name is None or name in batch:
            return batch
        return {name: self._all_samples, **batch}

    @cached_property
    def _all_samples(self) -> Array:
        """The number of samples of a batch, in the form of the input that takes it."""
        dims = self.spec.batch
        sizes = (port.shape[dims[port.name]] for port in self.data if port.name in dims)
        return np.asarray(next(sizes), np.float32)

    def evaluate(self, batch: Mapping[str, Array]) -> dict[str, float]:
        """Returns the loss and other metrics of the model in inference mode on a batch, by name.
        Changes no state. Errors: InputError, RankError."""
        return {name: value for name, (value, _) in self.measure(batch).items()}

    def measure(self, batch: Mapping[str, Array]) -> dict[str, tuple[float, float]]:
        """Like `evaluate`; returns (mean, weight) for each metric. The weight is the number of
        elements that count, by which the caller can average means over batches of different
        lengths."""
        names = self.spec.evaluation
        outputs = self.session.run(names, self._fed(batch))
        values = dict(zip(names, map(float, outputs), strict=True))
        each = batch.get(self.spec.labels or self.spec.target or "")
        size = 1 if each is None else np.size(each)
        shares = {
            name: values.get(f"{WEIGHT}.{name[len(EVALUATION) + 1 :]}", 1.0) for name in names
        }
        return {
            name[len(EVALUATION) + 1 :]: (value, shares[name] * size)
            for name, value in values.items()
            if not name.startswith(WEIGHT)
        }

    def hold(self, folder: str | os.PathLike[str]) -> None:
        """Locks a folder for checkpoints until `close`, so that no other run writes there; creates
        the folder if it does not exist. Errors: InputError if another run has locked it; ModelError
        if not all processes see the folder; OnnxparError."""
        place = Path(folder)
        if place not in self._held:
            self.together.first(lambda: self._lock(place))
            self._check_shared(place / LOCK)
            self._held.add(place)

    def _check_shared(self, lock: Path) -> None:
        """Checks that all processes see the lock file that rank 0 sees. Errors: ModelError in all
        processes."""
        holder = self.together.first(lambda: _text(lock))
        check_seen(
            lambda: "" if _text(lock) == holder else f"it does not see {lock}", self.together
        )

    def _lock(self, folder: Path) -> None:
        """Locks a folder, unless this trainer has locked it already."""
        locks = [*self._locks, *([self._given] if self._given else [])]
        if not any(lock.is_of(folder) for lock in locks):
            self._locks.append(FolderLock(folder))

    def save(self, folder: str | os.PathLike[str], progress: Progress) -> None:
        """Writes a checkpoint, with the run's `progress`, into a folder of checkpoints; each rank
        writes its own shards. The checkpoint gets its name only when it is complete and on disk.
        Errors: OnnxparError."""
        self.finish_save()
        folder = Path(folder)
        with self._begun(folder, progress) as written:
            files = self.session.states.save(written)
            arguments = self.steps, self.bundle, self._saved, files
            self.together.first(lambda: finish(written, progress, *arguments))
        self._note(folder, progress)

    def async_save(self, folder: str | os.PathLike[str], progress: Progress) -> None:
        """Like `save`, but returns as soon as each rank has copied its shards in memory: the copies
        are written while the ranks run on. First waits for the checkpoint before, if it is still
        being written. Errors: OnnxparError, also of the checkpoint before."""
        self.finish_save()
        folder = Path(folder)
        with self._begun(folder, progress) as written:
            self.session.states.save_later(written)
            if self.leads:
                end = partial(finish, written, progress, self.steps, self.bundle, self._saved)
                self._pending = PendingCheckpoint(written, self.session.ranks, end)
        self._unfinished = folder, progress

    def finish_save(self) -> Progress | None:
        """Waits until the checkpoint that `async_save` began is complete and on disk. Returns its
        progress, or None if there is none. Errors: OnnxparError if it cannot be written, or if
        nothing is written for a long time; RankError if a rank has died."""
        if self._unfinished is None:
            return None
        folder, progress = self._unfinished
        self._unfinished = None
        has_told = False
        while not self.together.first(self._is_finished):
            self.session.check_alive()
            if self.leads and not has_told:
                has_told = True
                tell(f"waiting for {folder / progress.name}, which is still being written")
        self._note(folder, progress)
        return progress

    def _is_finished(self) -> bool:
        """On rank 0: waits a moment for the checkpoint that is being written. True if it is
        complete. Errors: OnnxparError."""
        assert self._pending is not None, "async_save has begun it"
        return self._pending.wait(_MOMENT)

    @property
    def _saved(self) -> Step:
        """The step with the states that checkpoints have: without frozen weights of the model,
        except those that a loaded checkpoint had."""
        slots = [s for s in self.spec.slots if s.kind != FROZEN or s.input in self._restored]
        return replace(self.spec, slots=slots)

    @contextmanager
    def _begun(self, folder: Path, progress: Progress) -> Iterator[Path]:
        """Yields a new folder, which all processes see, to write a checkpoint to; removes the
        folder if the block fails."""
        self.hold(folder)
        written = folder / self.together.first(lambda: begin(folder, progress))
        try:
            check_seen(
                lambda: "" if written.is_dir() else f"it does not see {written}", self.together
            )
            yield written
        except BaseException:
            if self.leads:
                discard(written)
            raise

    def _note(self, folder: Path, progress: Progress) -> None:
        """Records that this checkpoint was saved last, and is complete."""
        self.checkpoint = folder / progress.name
        self._is_whole[self.checkpoint] = True

    def keep(
        self,
        folder: str | os.PathLike[str],
        progress: Progress,
        count: int,
        besides: Collection[str] = (),
    ) -> None:
        """Removes old checkpoints from a folder, except the newest `count` complete ones, and those
        named in `besides`. Leaves checkpoints with more steps than `progress` alone. Errors:
        OnnxparError."""
        folder = Path(folder)
        names = self.together.first(lambda: _names(folder, progress.step))
        at = 0
        while count and at < len(names):
            count -= self._check_whole(folder / names[at])
            at += 1
        old = [name for name in names[at:] if name not in besides]
        self.together.first(lambda: remove(folder / name for name in old))

    def _check_whole(self, path: Path) -> bool:
        """True if a checkpoint is complete. Compares its files with their digests, once; a
        checkpoint that this trainer saved or loaded needs no comparison."""
        if path not in self._is_whole:
            reason = damage(path, self.together)
            self._is_whole[path] = not reason
            if reason and self.leads:
                warn(f"{reason}; --keep does not count it")
        return self._is_whole[path]

    def find(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Opens a checkpoint like `Checkpoint.load`; under a launcher, all processes open the same
        one."""
        return load_together(Path(path), self.together)

    def load(
        self, checkpoint: Checkpoint | str | os.PathLike[str], allow_changed: bool = False
    ) -> Checkpoint:
        """Sets all states from a checkpoint, or from the newest complete checkpoint in a folder.
        Returns the checkpoint. It may be from a run on another mesh, or with another compression of
        gradients.

        With `allow_changed`, it may also be from a step that trains other weights or keeps other
        states: states that this step does not keep are left out; if it keeps others, the optimizer
        starts anew. Errors: ModelError if it belongs to another step, or if the processes pass
        different checkpoints.
        """
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = self.find(checkpoint)
        each = self.together.each([checkpoint.digest, str(checkpoint.path)])
        odd = next((rank for rank, (digest, _) in enumerate(each) if digest != each[0][0]), None)
        if odd is not None:
            raise ModelError(
                f"{each[0][1]} was given to rank 0, but {each[odd][1]} to rank {odd}; give load() "
                "the folder of checkpoints, so that all ranks load the same one"
            )
        self._load(checkpoint, allow_changed)
        self.steps = checkpoint.taken
        self.checkpoint = checkpoint.path
        self._is_whole[checkpoint.path] = True
        return checkpoint

    def _load(self, checkpoint: Checkpoint, allow_changed: bool) -> None:
        """Sets the states from a checkpoint, each from its shards if they are equal to this mesh's,
        else from the whole tensor. Errors: ModelError."""
        known = {slot.input for slot in checkpoint.slots}
        kinds = {slot.input: slot.kind for slot in self.spec.slots}
        frozen = frozenset(name for name, kind in kinds.items() if kind == FROZEN)
        absent = [n for n, k in kinds.items() if n not in known and k not in (RESIDUAL, FROZEN)]
        if absent and not allow_changed:
            raise ModelError(
                f"{checkpoint.path} has no {absent[0]!r}; it belongs to another training step; "
                "give a checkpoint of this one, or --allow-changed to start the optimizer anew"
            )
        more = [
            slot
            for slot in checkpoint.slots
            if slot.kind != RESIDUAL and slot.input not in kinds and slot.of not in frozen
        ]
        if more and not allow_changed:
            raise ModelError(f"{checkpoint.path} {_not_here(more)}")
        inputs, states = self.bundle.inputs, checkpoint.states
        try:
            for name in [name for name in kinds if name in known]:
                check_array(inputs[name], states.blank(name))
        except InputError as error:
            raise ModelError(f"{checkpoint.path}: {error}") from None
        self.session.states.reset()
        self._restored = frozen & known
        if absent and self.leads:
            lacks = _first(absent, "", "state")
            warn(f"{checkpoint.path} has no {lacks}: the optimizer, and what it lacks, start anew")
        names = [n for n, k in kinds.items() if n in known and not (absent and k not in IN_MODEL)]
        alike = [n for n in names if states.has_same_shards(n, self.bundle.mesh, inputs[n])]
        self.session.states.load(checkpoint.path, alike)
        tables = [n for n in self.session.states.on_host if n in names and n not in alike]
        if tables:
            self.session.states.load(checkpoint.path, tables, states.origin(tables))
        for name in [n for n in names if n not in alike and n not in tables]:
            self.session.states.write(name, states.read(name))

    def close(self) -> None:
        """Ends the ranks, and unlocks the folders of checkpoints. A checkpoint that is still being
        written gets up to 10 seconds to be completed."""
        try:
            if self._pending is not None:
                self._pending.abandon(_CLOSING if self._is_alive() else 0)
            self.session.close()
        finally:
            while self._locks:
                self._locks.pop().release()

    def _is_alive(self) -> bool:
        """True if the ranks still run."""
        try:
            self.session.check_alive()
        except RankError:
            return False
        return True


def _text(file: Path) -> str:
    """Returns the text of a file; "" if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_step(step: Step | None, inputs: Collection[str], where: str | os.PathLike[str]) -> Step:
    """Returns the training step of a model with these inputs; `where` names the model in errors.
    Errors: ModelError if the model is no training step (`step` is None), or one that updates
    nothing."""
    if step is None:
        raise ModelError(
            f"{where} is not a training step; write one with `onnxpar grad`, then shard that"
        )
    if step.rate not in inputs:
        raise ModelError(
            f"{where} has no optimizer: it returns gradients and updates nothing; give `onnxpar "
            "grad` an --optimizer"
        )
    return step


@contextmanager
def held_by_first(folder: Path | None) -> Iterator[FolderLock | None]:
    """Locks a folder of checkpoints on rank 0 and yields the lock; yields None on other ranks, or
    if `folder` is None. Use it before anything is written, and give the lock to a Trainer. Errors:
    InputError if another process has locked the folder; OnnxparError."""
    rank = launched_rank()
    if folder is None or (rank is not None and rank.rank):
        yield None
    else:
        with FolderLock(folder) as lock:
            yield lock


def _first(names: Sequence[str], of: str, what: str) -> str:
    """Returns the first of several names, and the number of others: "'fc.w' and 2 other states".
    `what` is the kind of thing that has the names, `of` a word before the number."""
    more = len(names) - 1
    others = f" and {of}{more} other {what}{'s' if more > 1 else ''}" if more else ""
    return f"{names[0]!r}{others}"


def _not_here(slots: Sequence[Slot]) -> str:
    """Returns a text that names a state of a checkpoint which a step does not keep, and the
    remedy."""
    trained = [slot.input for slot in slots if slot.kind == "parameter"]
    if not trained:
        return (
            f"has {slots[0].input!r}, which this step does not keep: another optimizer wrote it; "
            "--allow-changed leaves it out"
        )
    first = _first(trained, "", "weight")
    return (
        f"has trained {first}, which this step holds as the model has them: write "
        "the step from a model with the trained weights (`onnxpar checkpoint merge`, then `onnxpar "
        "grad --frozen`); --allow-changed goes on with those of the model"
    )


def _names(folder: Path, most: int) -> list[str]:
    """Returns the names of the checkpoints in a folder that have at most `most` steps, newest
    first."""
    each = checkpoints(folder)
    return [path.name for step, path in reversed(each.items()) if step <= most]
