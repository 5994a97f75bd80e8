"""A file that arrives piece by piece from another rank."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from onnxpar.base.digests import BLOCK, Digests
from onnxpar.base.errors import ModelError

_SYNCED = 32 << 20
"""Bytes after whose arrival a file is synced to the disk: a single sync at the end could take
longer than other ranks wait."""


class ReceivedFile:
    """Writes a new file that arrives piece by piece, and compares it with its digests meanwhile.
    Errors: OSError if the file exists, or cannot be written."""

    def __init__(self, path: Path, digests: Digests) -> None:
        self._digests = digests
        self._sink = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._size = self._synced = 0

    def append(self, data: memoryview) -> None:
        """Writes data at the end of the file: whole blocks of BLOCK bytes; only the last block of
        the file may be shorter. Errors: ModelError for bytes that contradict the digests;
        OSError."""
        assert self._size % BLOCK == 0, "blocks begin at multiples of their size"
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            expected = self._digests["sha256"][self._size // BLOCK]
            if hashlib.sha256(block).hexdigest() != expected:
                raise ModelError(f"SHA-256 differs in the {BLOCK >> 20} MiB from byte {self._size}")
            written = 0
            while written < len(block):
                written += os.pwrite(self._sink, block[written:], self._size + written)
            self._size += written
        if self._size - self._synced >= _SYNCED:
            os.fdatasync(self._sink)
            self._synced = self._size

    def close(self) -> None:
        """Closes the file; if it is complete, it is on the disk then. Errors: OSError if a write
        failed."""
        try:
            if self._size == self._digests["bytes"]:
                os.fsync(self._sink)
        finally:
            os.close(self._sink)
