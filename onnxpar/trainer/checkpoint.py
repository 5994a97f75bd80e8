"""Checkpoints: a folder with all that a training run needs to resume, which appears complete or not
at all.

`DIR/step_00000100/` has `checkpoint.json` and each rank's shards of the states. The JSON lists the
digests of all files and ends with its own, so that all damage is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from onnxpar.errors import DamagedError, ModelError, NewerFormatError, OnnxparError
from onnxpar.files.digests import (
    BLOCK,
    Block,
    Digests,
    blocks_of,
    check_blocks,
    check_listed,
    check_seal,
    check_size,
)
from onnxpar.files.write_file import unread
from onnxpar.ir.training_spec import Slot
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.runtime.redirect import report_for_all_ranks
from onnxpar.runtime.state_files import StateFiles
from onnxpar.trainer.together import ALONE, Together

FORMAT = 2
"""The format with digests of 1 MiB blocks; another block size needs another number."""
_WITHOUT_DIGESTS = 1
"""The format before it, which can still be read."""
RECORD = "checkpoint.json"
_NAME = re.compile(r"step_(\d{8,})|\.step_(\d{8,})\.old\.onnxpar")
"""The second name is that of a checkpoint that is being replaced, where the file system cannot swap
names."""
_RESTORE = "restore it from a copy, or go on from another checkpoint"
_ROUND = (1 << 29) // BLOCK
"""Blocks that a process reads between two exchanges with the others, which bounds their wait."""
_LATE = 20.0
"""Seconds within which all processes must see the files that rank 0 sees."""


@dataclass(frozen=True)
class Progress:
    """The number of steps that a run has taken: `step` in all, `in_epoch` of them in the current
    epoch, which is numbered `epoch`, from 0."""

    step: int = 0
    epoch: int = 0
    in_epoch: int = 0
    seed: int = 0

    def after_step(self, batches: int) -> Progress:
        """The progress one step later, with so many steps in an epoch."""
        in_epoch = self.in_epoch + 1
        if in_epoch == batches:
            return replace(self, step=self.step + 1, epoch=self.epoch + 1, in_epoch=0)
        return replace(self, step=self.step + 1, in_epoch=in_epoch)

    @property
    def name(self) -> str:
        """The name of its checkpoint."""
        return f"step_{self.step:08d}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. `digest` identifies its content; in the format without digests of
    files, that of checkpoint.json alone."""

    path: Path
    progress: Progress
    slots: list[Slot]
    states: StateFiles
    files: Mapping[str, Digests]
    digest: str

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Checkpoint:
        """Opens a checkpoint, or the newest complete one in a folder of them, after comparing all
        of its bytes with their digests. A warning on stderr names each damaged one that is passed
        over. Errors: ModelError; a damaged checkpoint that `path` names is never replaced by
        another."""
        return load_together(Path(path), ALONE)


def load_together(path: Path, together: Together) -> Checkpoint:
    """`Checkpoint.load` in all processes of a run: each verifies its share of the bytes, and all
    open the same checkpoint."""
    found, damaged = _find(path, together)
    if together.leads:
        for reason in damaged:
            warn(f"{reason}; {found.path} is loaded instead")
        if not found.files:
            warn(
                f"{found.path} was written by an older onnxpar and has no SHA-256 digests: it is "
                "not verified"
            )
    return found


def damage(path: Path, together: Together) -> str:
    """Describes the damage of a checkpoint, the same in all processes; empty if there is none."""
    try:
        _find(path, together)
    except DamagedError as error:
        return str(error).removesuffix(f"; {_RESTORE}")
    except NewerFormatError:  # only a newer onnxpar can verify it
        return ""
    return ""


def warn(text: str) -> None:
    """Prints a warning on stderr, and on the terminal if stderr is a log file."""
    print(f"onnxpar: warning: {text}", file=sys.stderr)
    report_for_all_ranks(f"warning: {text}")


def check_seen(missing: Callable[[], str], together: Together) -> None:
    """Waits until every process sees the files that rank 0 sees, as a network file system may show
    them late. `missing` describes what a process does not see. Errors: ModelError, in all
    processes, after _LATE seconds."""
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
    """The checkpoints of a folder, damaged ones too, by their number of steps, in order. Errors:
    ModelError where the folder cannot be read."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ModelError(f"cannot read {folder}: {unread(error)}") from None
    found: dict[int, Path] = {}
    for name in names:  # a checkpoint that replaces another sorts after it, and so is kept here
        if match := _NAME.fullmatch(name):
            found[int(match[1] or match[2])] = folder / name
    return dict(sorted(found.items()))


def _find(path: Path, together: Together) -> tuple[Checkpoint, list[str]]:
    """Finds the checkpoint to load, and describes the damage of each newer one. Errors:
    ModelError."""
    damaged: dict[str, str] = {}
    while True:
        name, text = together.first(lambda: _candidate(path, damaged))
        found = _read(path / name, text.encode())
        fault = _fault(found, together)
        if not fault:
            return found, [why for one, why in damaged.items() if (path / one).exists()]
        if not name:
            raise DamagedError(f"{fault}; {_RESTORE}")
        damaged[name] = fault


def _candidate(path: Path, damaged: dict[str, str]) -> tuple[str, str]:
    """The name of a folder's newest checkpoint that is not known to be damaged, and its
    checkpoint.json; adds those that it finds damaged to `damaged`, by name. The name is empty where
    `path` is a checkpoint itself. Errors: ModelError."""
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
    """The text of checkpoint.json, if all files of the checkpoint exist. Errors: ModelError."""
    file = folder / RECORD
    try:
        text = file.read_bytes()
    except OSError as error:
        raise DamagedError(f"cannot read {file}: {unread(error)}") from None
    if missing := _missing(_read(folder, text)):
        raise DamagedError(missing)
    return text.decode()


def _read(folder: Path, text: bytes) -> Checkpoint:
    """The checkpoint in a folder, from the text of its checkpoint.json. Errors: DamagedError;
    NewerFormatError."""
    file = folder / RECORD
    try:
        data = json.loads(text.decode())
        is_old = data["format"] == _WITHOUT_DIGESTS and not data.keys() & {"files", "sha256"}
        if not is_old:
            _check_sealed(file, text)
            if data["format"] != FORMAT:
                raise NewerFormatError(
                    f"{file} has format {data['format']}, but this onnxpar reads format {FORMAT}; "
                    "update onnxpar"
                )
        mesh = Mesh.of((name, size) for name, size in data["mesh"])
        layouts = {name: Layout.from_json(tree) for name, tree in data["layouts"].items()}
        slots = [Slot(**slot) for slot in data["slots"]]
        progress = Progress(**data["progress"])
        files: Mapping[str, Digests] = {} if is_old else data["files"]
        check_listed(files)
    except (DamagedError, NewerFormatError):
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OnnxparError) as error:
        raise DamagedError(
            f"{file} is damaged, or not written by onnxpar ({type(error).__name__}: {error})"
        ) from None
    states = StateFiles(folder, mesh, layouts)
    return Checkpoint(folder, progress, slots, states, files, hashlib.sha256(text).hexdigest())


def _check_sealed(file: Path, text: bytes) -> None:
    try:
        check_seal(file, text, "")
    except ModelError as error:
        raise DamagedError(str(error)) from None


def _missing(found: Checkpoint) -> str:
    """Names a file that is missing or has another size; empty if there is none."""
    try:
        for name, digests in found.files.items():
            check_size(found.path / name, digests, "")
    except ModelError as error:
        return str(error)
    return ""


def _fault(found: Checkpoint, together: Together) -> str:
    """Compares all bytes with their digests, each process its share. Returns a description of the
    damage, the same in all processes; empty if there is none. Errors: ModelError where a process
    does not see the files that rank 0 sees."""
    check_seen(lambda: _missing(found), together)
    blocks = blocks_of(found.files)
    step = _ROUND * together.size
    for start in range(0, len(blocks), step):
        share = blocks[start : start + step][together.rank :: together.size]
        if fault := next(filter(None, together.each(_changed(found, share))), ""):
            return fault
    return next(filter(None, together.each(_unopened(found))), "")


def _unopened(found: Checkpoint) -> str:
    """Opens the files of a checkpoint, because a run may remove them later. Returns a description
    of the error, if any."""
    try:
        if found.files:
            found.states.open()
    except (OSError, ValueError) as error:
        return f"cannot read {found.path}: {error}"
    return ""


def _changed(found: Checkpoint, blocks: list[Block]) -> str:
    try:
        check_blocks(found.path, blocks, "")
    except ModelError as error:
        return str(error)
    return ""
