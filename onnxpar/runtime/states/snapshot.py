"""Copies of a rank's states, which a thread writes to a folder while the rank goes on to run.

When the files of a rank are on disk, a file `rank_0000.written` appears beside them, with their
digests or with the reason why there are none. So any process that sees the folder can tell when all
ranks have written, without a message to ranks that compute.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.digests import Digests
from onnxpar.base.errors import OnnxparError
from onnxpar.base.write_file import unread
from onnxpar.runtime.ranks.log import describe
from onnxpar.runtime.states.host_table import HostTable
from onnxpar.runtime.states.state_files import remove_parts, write_parts

Part = tuple[str, Array | HostTable]
"""(name of a state, a rank's shard of it)."""


class Snapshot:
    """A copy of a rank's shards of states, made when this object is: arrays are copied in memory,
    tables to new files beside theirs. Errors: InputError if there is no room for a table."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = deque((name, _copied(part)) for name, part in parts)

    def write_later(self, folder: Path, rank: int) -> threading.Thread:
        """Starts a thread that writes the copies to the folder, and frees the memory of each as
        soon as it is written. Returns the thread."""
        thread = threading.Thread(
            target=self._write, args=(folder, rank), daemon=True, name="onnxpar-checkpoint"
        )
        thread.start()
        return thread

    def _write(self, folder: Path, rank: int) -> None:
        """The function of the thread: writes the copies, then the file `marker`, which tells that
        all are written, or why not."""
        try:
            told: dict[str, Any] = {"files": write_parts(folder, rank, self._taken())}
        except Exception as error:  # the outermost boundary of the thread: who waits is told
            told = {"error": f"rank {rank}: {describe(error)}"}
            remove_parts(folder, rank)  # frees the space that the line below needs
        with suppress(OSError):  # the folder is gone, or the disk is full; then the wait ends
            unnamed = folder / f".{marker(rank)}"
            unnamed.write_text(json.dumps(told), encoding="utf-8")
            unnamed.replace(folder / marker(rank))

    def _taken(self) -> Iterator[Part]:
        """Yields the copies one by one, and drops each, so that its memory is free once it is
        written."""
        while self._parts:
            yield self._parts.popleft()


def _copied(part: Array | HostTable) -> Array | HostTable:
    return np.array(part) if isinstance(part, np.ndarray) else part.duplicate()


def marker(rank: int) -> str:
    """The name of the file that says that a rank has written: "rank_0003.written"."""
    return f"rank_{rank:04d}.written"


def written_by(folder: Path, rank: int) -> dict[str, Digests]:
    """Returns the digests of the files that a rank has written, by file name. Errors: OnnxparError
    if the rank could not write them."""
    try:
        told = json.loads((folder / marker(rank)).read_text(encoding="utf-8"))
    except OSError as error:
        raise OnnxparError(f"cannot read {folder / marker(rank)}: {unread(error)}") from None
    if "error" in told:
        raise OnnxparError(told["error"])
    files: dict[str, Digests] = told["files"]
    return files


def forget_written(folder: Path, ranks: int) -> None:
    """Removes the files `marker` of all ranks, each of which must have written. Errors: OSError if
    one is missing."""
    for rank in range(ranks):
        (folder / marker(rank)).unlink()
