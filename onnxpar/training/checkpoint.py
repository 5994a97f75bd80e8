"""Checkpoints: what a training run needs to go on, as a folder that appears at once.

`DIR/step_00000100/` has `checkpoint.json` and each rank's parts of the states. A folder that lacks
its final name was not finished, and is ignored.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onnxpar.errors import ModelError, OnnxparError
from onnxpar.layout import Layout
from onnxpar.mesh import Mesh
from onnxpar.runtime.bundle import Bundle
from onnxpar.runtime.state_files import StateFiles
from onnxpar.step import Slot, Step
from onnxpar.write_file import unread, writing

FORMAT = 1
_NAME = re.compile(r"step_(\d{8})")


@dataclass(frozen=True)
class Progress:
    """How far a run has come: `step` steps in all, of which `in_epoch` in epoch `epoch`, both from
    0."""

    step: int = 0
    epoch: int = 0
    in_epoch: int = 0
    seed: int = 0

    def behind(self, batches: int) -> Progress:
        """Behind one step more, in epochs of so many."""
        in_epoch = self.in_epoch + 1
        if in_epoch == batches:
            return replace(self, step=self.step + 1, epoch=self.epoch + 1, in_epoch=0)
        return replace(self, step=self.step + 1, in_epoch=in_epoch)

    @property
    def name(self) -> str:
        """What its checkpoint is called."""
        return f"step_{self.step:08d}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    progress: Progress
    slots: list[Slot]
    states: StateFiles

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Checkpoint:
        """Reads a checkpoint, or the newest one of a folder of them. Errors: ModelError."""
        folder = Path(path)
        if not (folder / "checkpoint.json").is_file():
            found = newest(folder)
            if found is None:
                raise ModelError(
                    f"{folder}: has no checkpoint; give the folder of `onnxpar train --checkpoint`"
                )
            folder = found
        try:
            data = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ModelError(f"{folder}: format {data['format']}, this onnxpar reads {FORMAT}")
            mesh = Mesh.of((name, size) for name, size in data["mesh"])
            layouts = {name: Layout.from_json(tree) for name, tree in data["layouts"].items()}
            slots = [Slot(**slot) for slot in data["slots"]]
            progress = Progress(**data["progress"])
        except ModelError:
            raise
        except OSError as error:
            raise ModelError(f"cannot read {folder / 'checkpoint.json'}: {unread(error)}") from None
        except (ValueError, KeyError, TypeError, AttributeError, OnnxparError) as error:
            raise ModelError(
                f"{folder / 'checkpoint.json'} is no checkpoint of onnxpar's, or damaged "
                f"({type(error).__name__}: {error}); go on from another one"
            ) from None
        return Checkpoint(folder, progress, slots, StateFiles(folder, mesh, layouts))


def newest(folder: Path) -> Path | None:
    """The checkpoint of the most steps in a folder, None where there is none."""
    return max(_checkpoints(folder), default=None)


def _checkpoints(folder: Path) -> list[Path]:
    found = [file.parent for file in folder.glob("step_*/checkpoint.json")]
    return sorted(path for path in found if _NAME.fullmatch(path.name))


def remove_all_but(folder: Path, count: int) -> None:
    """Removes all checkpoints of a folder but the newest so many."""
    for path in _checkpoints(folder)[:-count]:
        (path / "checkpoint.json").unlink()  # from here on it is none, whatever is left
        shutil.rmtree(path, ignore_errors=True)


def unfinished(folder: Path, progress: Progress) -> Path:
    """The folder that a checkpoint is written to first."""
    return folder / f".{progress.name}.unfinished"


def begin(folder: Path, progress: Progress) -> None:
    """Makes the folder that a checkpoint is written to first, and removes what was left of others
    that were not finished."""
    for left in folder.glob(".step_*.unfinished"):
        shutil.rmtree(left, ignore_errors=True)
    with writing(folder):
        unfinished(folder, progress).mkdir(parents=True)


def finish(folder: Path, progress: Progress, bundle: Bundle, step: Step) -> None:
    """Gives a folder to which all ranks have written their states its final name."""
    layouts = {name: bundle.inputs[name].layout for name in bundle.states}
    data: Mapping[str, Any] = {
        "format": FORMAT,
        "mesh": [list(axis) for axis in bundle.mesh.shape],
        "layouts": {name: layout.to_json() for name, layout in layouts.items() if layout},
        "slots": [asdict(slot) for slot in step.slots],
        "progress": asdict(progress),
    }
    written = unfinished(folder, progress)
    file = written / "checkpoint.json"
    final = folder / progress.name
    with writing(final):
        with file.open("w", encoding="utf-8") as sink:
            json.dump(data, sink)
            sink.flush()
            os.fsync(sink.fileno())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(written, final)
