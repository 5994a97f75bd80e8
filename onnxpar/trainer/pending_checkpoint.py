"""A checkpoint that ranks write while they train on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from onnxpar.base.digests import Digests
from onnxpar.base.errors import OnnxparError
from onnxpar.base.write_file import writing
from onnxpar.runtime.states.snapshot import forget_written, marker, written_by
from onnxpar.trainer.write_checkpoint import discard

_LOOK = 0.1
"""Most seconds between two looks whether ranks have written."""
STALLED = 600.0
"""Seconds without a new byte after which a checkpoint is given up: a disk or a network file system
hangs."""


class PendingCheckpoint:
    """Completes a checkpoint in a thread, once all ranks have written their files to the folder
    `written`. If a rank fails, or takes too long, the folder is removed, and no checkpoint remains.

    finish  a function that completes the checkpoint; it takes the digests of all files
    """

    def __init__(
        self, written: Path, ranks: int, finish: Callable[[Mapping[str, Digests]], None]
    ) -> None:
        self._written, self._ranks, self._finish = written, ranks, finish
        self._files: dict[int, dict[str, Digests]] = {}
        self._is_abandoned = threading.Event()
        self._has_ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="onnxpar-checkpoint")
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds`. Returns True if the checkpoint is complete, False if it is
        still being written. Errors: OnnxparError if it cannot be completed; then no file of it
        remains."""
        if not self._has_ended.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def abandon(self, seconds: float) -> None:
        """Waits up to `seconds` for the ranks, and then gives the checkpoint up, unless all have
        written. Returns when the checkpoint is complete, or no file of it remains."""
        self._has_ended.wait(seconds)
        self._is_abandoned.set()
        self._thread.join(STALLED)

    def _run(self) -> None:
        """The body of the thread: waits for the ranks, then completes or removes the checkpoint."""
        try:
            if self._all_written():
                with writing(self._written):
                    forget_written(self._written, self._ranks)
                ranks = range(self._ranks)  # in their order, whichever was first
                self._finish({n: d for rank in ranks for n, d in self._files[rank].items()})
            else:
                discard(self._written)
        except Exception as error:  # the outermost boundary of the thread: `wait` raises it
            discard(self._written)
            self._error = error
        finally:
            self._has_ended.set()

    def _all_written(self) -> bool:
        """Waits until all ranks have written; False if the checkpoint is abandoned before. Errors:
        OnnxparError if a rank cannot write, or if nothing is written for STALLED seconds."""
        start = since = time.monotonic()
        size = -1
        while True:
            is_last_look = self._is_abandoned.is_set()
            now = self._look()
            if len(self._files) == self._ranks:
                return True
            if is_last_look:
                return False
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > STALLED:
                late = next(r for r in range(self._ranks) if r not in self._files)
                raise OnnxparError(
                    f"{self._written}: rank {late} has not finished its files, and no rank has "
                    f"written anything for {STALLED:.0f} s; see whether the disk hangs"
                )
            self._is_abandoned.wait(min((time.monotonic() - start) / 8 + 0.001, _LOOK))

    def _look(self) -> int:
        """Records which ranks have written their files. Returns the bytes in the folder so far,
        which tell whether ranks still write. Errors: OnnxparError if a rank cannot write."""
        sizes = _sizes_in(self._written)
        for rank in range(self._ranks):
            if rank not in self._files and marker(rank) in sizes:
                self._files[rank] = written_by(self._written, rank)
        return sum(sizes.values())


def _sizes_in(folder: Path) -> dict[str, int]:
    """Returns the sizes of the files in a folder in bytes, by name. Errors: OnnxparError."""
    sizes: dict[str, int] = {}
    with writing(folder), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it has just got another name
                sizes[entry.name] = entry.stat().st_size
    return sizes
