"""Writes and removes checkpoints in a folder; a kill at any moment leaves complete checkpoints
complete.

A checkpoint is written to `.step_00000100.1f2e3d4c.unfinished`, and gets its final name when all of
it is on disk. A checkpoint that is to be removed first gets such an unfinished name. The next
process that writes to the folder removes all folders with such names; only one process writes at a
time (`onnxpar/base/folder_lock.py`).
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onnxpar.base.digests import Digests, check_size, sealed
from onnxpar.base.new_folder import aside, put_back, take_place
from onnxpar.base.write_file import durable_file, sync_folder, writing
from onnxpar.graph.training_spec import Step
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.trainer.checkpoint import FORMAT, RECORD, Progress, checkpoints

_UNFINISHED = ".unfinished"


def begin(folder: Path, progress: Progress) -> str:
    """Creates an empty folder for an unfinished checkpoint, to which the ranks write, and returns
    its name. First removes the remains of earlier unfinished ones. Errors: OnnxparError."""
    with writing(folder):
        for left in folder.glob(f".step_*{_UNFINISHED}"):
            discard(left)
        for step in checkpoints(folder):
            place = folder / Progress(step).name
            put_back(place)
            discard(aside(place))
        name = _unfinished(progress.name)
        (folder / name).mkdir()
    return name


def finish(
    written: Path,
    progress: Progress,
    taken: int,
    bundle: Bundle,
    step: Step,
    files: Mapping[str, Digests],
) -> None:
    """Completes a checkpoint after all ranks have written their states to the folder `written`:
    writes checkpoint.json, and gives the folder its final name. A complete checkpoint of that name
    is replaced.

    taken  the number of steps of the trainer, for checkpoint.json
    step   the training step, whose slots are the states
    files  the digests of all files, by name

    Errors: OnnxparError.
    """
    layouts = {slot.input: bundle.inputs[slot.input].layout for slot in step.slots}
    data: Mapping[str, Any] = {
        "format": FORMAT,
        "mesh": [list(axis) for axis in bundle.mesh.shape],
        "layouts": {name: layout.to_json() for name, layout in layouts.items() if layout},
        "slots": [asdict(slot) for slot in step.slots],
        "progress": asdict(progress),
        "taken": taken,
        "files": files,
    }
    for name, digests in files.items():
        check_size(written / name, digests, "give --checkpoint a folder that all hosts share")
    final = written.parent / progress.name
    with writing(final):
        with durable_file(written / RECORD) as sink:
            sink.write(sealed(data).encode())
        sync_folder(written)
        take_place(written, final)
    discard(written)  # by now, the checkpoint that was replaced


def remove(paths: Iterable[Path]) -> None:
    """Removes these checkpoints. Errors: OnnxparError."""
    for path in paths:
        with writing(path):
            left = path.with_name(_unfinished(path.name.removeprefix(".")))
            path.rename(left)  # from here on it is no checkpoint, even if the next line fails
        discard(left)


_TRIES = 10
"""Attempts to remove a folder: ranks that still write may add files to it."""


def discard(left: Path) -> None:
    """Removes a folder or file that is not a complete checkpoint, and ignores errors. Of a link,
    removes the link alone."""
    if left.is_dir() and not left.is_symlink():
        for _ in range(_TRIES):
            shutil.rmtree(left, ignore_errors=True)
            if not left.exists():
                break
    elif os.path.lexists(left):
        with suppress(OSError):
            left.unlink()


def _unfinished(name: str) -> str:
    """Returns a new name for an unfinished checkpoint, such as
    `.step_00000100.1f2e3d4c.unfinished`. It differs each time, because a rank of a killed run may
    still write to an earlier folder."""
    return f".{name}.{secrets.token_hex(4)}{_UNFINISHED}"
