"""Checkpoints: folders from which a training run can resume. A checkpoint gets its name only when
it is complete.

`DIR/step_00000100/` has `checkpoint.json` and each rank's shards of the states. The JSON lists the
digests of all files and ends with a digest of itself, so that all damage is detected.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxpar.base.digests import (
    BLOCK,
    Block,
    Digests,
    blocks_of,
    check_blocks,
    check_listed,
    check_seal,
    check_size,
)
from onnxpar.base.errors import DamagedError, ModelError, NewerFormatError, OnnxparError
from onnxpar.base.log import LOG
from onnxpar.base.read_bounded import read_bounded
from onnxpar.base.write_file import unread
from onnxpar.graph.training_spec import Slot
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.runtime.ranks.redirect import report_for_all_ranks
from onnxpar.runtime.states.state_files import StateFiles
from onnxpar.trainer.together import ALONE, Together

FORMAT = 3
"""The number of the current format, with digests of 1 MiB blocks. Increase it if the block size
changes."""
_IN_STEPS = 2
"""The format before, which counts the steps of an epoch; it can be read between epochs."""
_WITHOUT_DIGESTS = 1
"""The previous format, which can still be read."""
RECORD = "checkpoint.json"
_NAME = re.compile(r"step_(\d{8,})|\.step_(\d{8,})\.old\.onnxpar")
"""The names of checkpoints. The second form is the name of a checkpoint while another replaces it,
on a file system that cannot swap names."""
_RESTORE = "restore it from a copy, or go on from another checkpoint"
_ROUND = (1 << 29) // BLOCK
"""Blocks that a process compares with their digests between two exchanges with the other processes:
this bounds how long processes wait for each other."""
_LATE = 20.0
"""Seconds that other processes wait for files that rank 0 already sees."""


_OF_SCHEDULE = {
    "kind": "--schedule",
    "warmup": "--warmup",
    "min_lr": "--min-lr",
    "power": "--lr-power",
    "step_size": "--lr-step-size",
    "gamma": "--lr-gamma",
    "decay_steps": "--decay-steps",
}
"""The options of a schedule, by its field."""


@dataclass(frozen=True)
class Settings:
    """The settings that decide which samples a run takes, and how its learning rate changes.

    batch      number of samples in a batch
    samples    number of samples in the data; None if only the end of an epoch tells
    data       digest of the data; "" if there is none
    shuffle    False if samples are used in the order of the file
    seed       decides the order of samples, and the random numbers of steps
    schedule   of the learning rate: the fields of `rates.Schedule`
    epochs     passes over the data, if the rates of the schedule depend on them; else None
    max_steps  most steps of the run, if the rates depend on them; else None
    """

    batch: int
    samples: int | None
    data: str
    shuffle: bool
    seed: int
    schedule: Mapping[str, Any]
    epochs: int | None
    max_steps: int | None = None

    def differences(self, now: Settings) -> list[str]:
        """Returns a text for each setting in which `now`, the settings of a run that resumes,
        differs from these: "batches of 4 samples, now 8"."""
        texts = {
            "batch": "batches of {} samples",
            "samples": "{} samples",
            "data": "data of digest {}",
            "shuffle": "shuffling {}",
            "seed": "--seed {}",
            "epochs": "--epochs {}",
            "max_steps": "--max-steps {}",
        }
        pairs = [(text, getattr(self, name), getattr(now, name)) for name, text in texts.items()]
        pairs += [
            (f"{option} {{}}", self.schedule.get(name), now.schedule.get(name))
            for name, option in _OF_SCHEDULE.items()
        ]
        changed = [(text, a, b) for text, a, b in pairs if a != b]
        if self.schedule.get("kind") != now.schedule.get("kind"):  # which says it
            changed = [c for c in changed if c[0] not in (texts["epochs"], texts["max_steps"])]
        return [f"{text.format(_shown(a))}, now {_shown(b)}" for text, a, b in changed]


def _shown(value: Any) -> str:
    """Returns a setting's value as text for an error."""
    words = {None: "not given", True: "on", False: "off", "": "unknown"}
    return words[value] if value in ("", None) or isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    step       number of steps that it has taken
    epoch      number of the current epoch, from 0
    samples    number of samples that it has taken in the current epoch
    settings   the settings of the run; None if steps were taken without a run
    best       the least loss of an evaluation so far; None if there is none
    best_step  the step after which the evaluation had this loss
    worse      number of evaluations since then
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    settings: Settings | None = None
    best: float | None = None
    best_step: int = 0
    worse: int = 0

    @staticmethod
    def of(data: Mapping[str, Any]) -> Progress:
        """Returns the progress from `data`, the form of `dataclasses.asdict` in checkpoint.json.
        Errors: TypeError, KeyError; ModelError for the older form of a checkpoint in the middle of
        an epoch, which counts steps, not samples."""
        if "in_epoch" in data:
            if data["in_epoch"]:
                raise ModelError(
                    "an older onnxpar wrote it in the middle of an epoch; go on from a checkpoint "
                    "of the end of an epoch"
                )
            return Progress(data["step"], data["epoch"])
        settings = data["settings"]
        return Progress(**{**data, "settings": None if settings is None else Settings(**settings)})

    def after_epoch(self) -> Progress:
        """Returns the progress at the beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, samples=0)

    def after_evaluation(self, loss: float) -> Progress:
        """Returns the progress after an evaluation with this loss: a new best, or one more that is
        not better."""
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            return replace(self, best=loss, best_step=self.step, worse=0)
        return replace(self, worse=self.worse + 1)

    @property
    def name(self) -> str:
        """The name of a checkpoint with this progress: step_00000100 after 100 steps."""
        return f"step_{self.step:08d}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    progress  how far the run was
    taken     number of steps of the trainer that wrote it, including steps before it resumed
    slots     the states: parameters, statistics, and optimizer states
    states    the files of the states
    files     digests of all files, by name; empty in the oldest format
    digest    the SHA-256 of checkpoint.json. As this file has the digests of all others, it
              identifies the content, except in the oldest format
    """

    path: Path
    progress: Progress
    taken: int
    slots: list[Slot]
    states: StateFiles
    files: Mapping[str, Digests]
    digest: str

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Checkpoint:
        """Opens a checkpoint after comparing every byte with the digests. If `path` is a folder of
        checkpoints, opens the newest complete one, and prints a warning for each newer damaged one.

        Errors: ModelError, also if `path` itself is a damaged checkpoint.
        """
        return load_together(Path(path), ALONE)


def load_together(path: Path, together: Together) -> Checkpoint:
    """Like `Checkpoint.load`, called in all processes of a run: each process verifies its share of
    the bytes, and all return the same checkpoint."""
    checkpoint, damaged = _find(path, together)
    if together.leads:
        for reason in damaged:
            warn(f"{reason}; {checkpoint.path} is loaded instead")
        if not checkpoint.files:
            warn(
                f"{checkpoint.path} was written by an older onnxpar and has no SHA-256 digests: it "
                "is not verified"
            )
    return checkpoint


def damage(path: Path, together: Together) -> str:
    """Returns a description of the damage to the checkpoint `path`, the same in all processes.
    Empty if there is none, or if the checkpoint has a newer format."""
    try:
        _find(path, together)
    except DamagedError as error:
        return str(error).removesuffix(f"; {_RESTORE}")
    except NewerFormatError:  # only a newer onnxpar can verify it
        return ""
    return ""


def warn(text: str) -> None:
    """Prints a warning on stderr; on rank 0, also on the launcher's terminal if stderr is a log
    file."""
    tell(f"warning: {text}")


def tell(text: str) -> None:
    """Prints a line on stderr; on rank 0, also on the launcher's terminal if stderr is a log file.
    Prints nothing if the log level is above warnings."""
    if LOG.isEnabledFor(logging.WARNING):
        print(f"onnxpar: {text}", file=sys.stderr)
        report_for_all_ranks(text)


def check_seen(missing: Callable[[], str], together: Together) -> None:
    """Waits until every process sees the files that rank 0 sees, because a network file system may
    show new files late. `missing` returns a description of a missing file, or "".

    Errors: ModelError, in all processes, after _LATE seconds.
    """
    deadline = time.monotonic() + (0 if together.leads else _LATE)
    while (absent := missing()) and time.monotonic() < deadline:
        time.sleep(_LATE / 100)
    each = enumerate(together.each("" if together.leads else absent))
    if odd := next(((rank, text) for rank, text in each if text), None):
        raise ModelError(
            f"rank {odd[0]}: {odd[1]}, which rank 0 sees; give --checkpoint a folder that all "
            "hosts share"
        )


def checkpoints(folder: Path) -> dict[int, Path]:
    """Returns the checkpoints in a folder, including damaged ones, by number of steps in ascending
    order. Errors: ModelError if the folder cannot be read."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ModelError(f"cannot read {folder}: {unread(error)}") from None
    by_step: dict[int, Path] = {}
    for name in names:  # a checkpoint that replaces another sorts after it, and so is kept here
        if match := _NAME.fullmatch(name):
            by_step[int(match[1] or match[2])] = folder / name
    return dict(sorted(by_step.items()))


def _find(path: Path, together: Together) -> tuple[Checkpoint, list[str]]:
    """Returns the checkpoint to load from `path` (a checkpoint or a folder of checkpoints), and a
    description of the damage to each newer checkpoint. Errors: ModelError."""
    damaged: dict[str, str] = {}
    while True:
        name, text = together.first(lambda: _candidate(path, damaged))
        checkpoint = _read(path / name, text.encode())
        fault = _fault(checkpoint, together)
        if not fault:
            return checkpoint, [why for one, why in damaged.items() if (path / one).exists()]
        if not name:
            raise DamagedError(f"{fault}; {_RESTORE}")
        damaged[name] = fault


def _candidate(path: Path, damaged: dict[str, str]) -> tuple[str, str]:
    """Returns (name, text of checkpoint.json) of the newest checkpoint in the folder `path` that is
    not in `damaged`; the name is "" if `path` is a checkpoint itself. Adds checkpoints with missing
    files to `damaged`, by name. Errors: ModelError."""
    if (path / RECORD).is_file() or _NAME.fullmatch(path.name):
        try:
            return "", _complete(path)
        except DamagedError as error:
            raise DamagedError(f"{error}; {_RESTORE}") from None
    while each := checkpoints(path):  # listed again: a run that writes there may have removed one
        left = [one for one in each.values() if one.name not in damaged]
        if not left:
            newest = max(each.items())[1]
            raise ModelError(
                f"{path}: all of its checkpoints ({len(each)}) are damaged; in the newest, "
                f"{damaged[newest.name]}; restore one from a copy, or choose another folder"
            )
        try:
            return left[-1].name, _complete(left[-1])
        except DamagedError as error:
            damaged[left[-1].name] = str(error)
    raise ModelError(
        f"{path} has no checkpoint; give a folder that `onnxpar train --checkpoint` wrote"
    )


def _complete(folder: Path) -> str:
    """Returns the text of a checkpoint's checkpoint.json. Errors: DamagedError if a file of the
    checkpoint is missing or has another size."""
    file = folder / RECORD
    try:
        text = read_bounded(file)
    except OSError as error:
        raise DamagedError(f"cannot read {file}: {unread(error)}") from None
    except ValueError as error:
        raise DamagedError(f"cannot read {file}: {error}") from None
    if missing := _missing(_read(folder, text)):
        raise DamagedError(missing)
    return text.decode()


def _read(folder: Path, text: bytes) -> Checkpoint:
    """Returns the checkpoint that `text`, its checkpoint.json, describes. Errors: DamagedError;
    NewerFormatError."""
    file = folder / RECORD
    try:
        data = json.loads(text.decode())
        is_old = data["format"] == _WITHOUT_DIGESTS and not data.keys() & {"files", "sha256"}
        if not is_old:
            _check_sealed(file, text)
            if data["format"] not in (FORMAT, _IN_STEPS):
                raise NewerFormatError(
                    f"{file} has format {data['format']}, but this onnxpar reads format {FORMAT}; "
                    "update onnxpar"
                )
        mesh = Mesh.of((name, size) for name, size in data["mesh"])
        layouts = {name: Layout.from_json(tree) for name, tree in data["layouts"].items()}
        for layout in layouts.values():
            layout.check_axes(mesh)
            if any(size < 0 for size in layout.shape):
                raise ValueError(f"a size is {min(layout.shape)}")
        slots = [Slot(**slot) for slot in data["slots"]]
        progress = Progress.of(data["progress"])
        taken = int(data.get("taken", progress.step))
        files: Mapping[str, Digests] = {} if is_old else data["files"]
        check_listed(files)
    except (DamagedError, NewerFormatError):
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OnnxparError) as error:
        raise DamagedError(
            f"{file} is damaged, or not written by onnxpar ({type(error).__name__}: {error})"
        ) from None
    states = StateFiles(folder, mesh, layouts)
    return Checkpoint(
        folder, progress, taken, slots, states, files, hashlib.sha256(text).hexdigest()
    )


def _check_sealed(file: Path, text: bytes) -> None:
    """Checks the digest that ends checkpoint.json. Errors: DamagedError."""
    try:
        check_seal(file, text, "")
    except ModelError as error:
        raise DamagedError(str(error)) from None


def _missing(checkpoint: Checkpoint) -> str:
    """Returns a description of a file of the checkpoint that is missing or has another size; "" if
    all are there."""
    try:
        for name, digests in checkpoint.files.items():
            check_size(checkpoint.path / name, digests, "")
    except ModelError as error:
        return str(error)
    return ""


def _fault(checkpoint: Checkpoint, together: Together) -> str:
    """Compares every byte of a checkpoint with the digests; each process reads its share. Returns a
    description of the damage, the same in all processes; "" if there is none.

    Errors: ModelError if a process does not see the files that rank 0 sees.
    """
    check_seen(lambda: _missing(checkpoint), together)
    blocks = blocks_of(checkpoint.files)
    step = _ROUND * together.size
    for start in range(0, len(blocks), step):
        share = blocks[start : start + step][together.rank :: together.size]
        if fault := next(filter(None, together.each(_changed(checkpoint, share))), ""):
            return fault
    return next(filter(None, together.each(_unopened(checkpoint))), "")


def _unopened(checkpoint: Checkpoint) -> str:
    """Opens the files of a checkpoint, so that they stay readable if a run removes the checkpoint.
    Returns a description of the error; "" if there is none."""
    try:
        if checkpoint.files:
            checkpoint.states.open()
    except (OSError, ValueError) as error:
        return f"cannot read {checkpoint.path}: {error}"
    return ""


def _changed(checkpoint: Checkpoint, blocks: list[Block]) -> str:
    """Compares blocks of a checkpoint's files with their digests. Returns a description of the
    first difference; "" if there is none."""
    try:
        check_blocks(checkpoint.path, blocks, "")
    except ModelError as error:
        return str(error)
    return ""
