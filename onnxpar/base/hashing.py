"""Computes SHA-256 in threads, while the caller goes on."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_WAITING = 4
"""Tasks for each core that may wait; with more, the caller waits, so that memory is bounded."""


@dataclass(frozen=True)
class Stretch:
    """Bytes of a file, which are read when they are hashed."""

    file: Path
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> Stretch:
        start, stop, _ = part.indices(self.length)
        return Stretch(self.file, self.start + start, stop - start)

    def read(self) -> bytes:
        """Returns the bytes. Errors: OSError, also if the file ends before."""
        with self.file.open("rb", buffering=0) as opened:
            parts, at = list[bytes](), 0
            while at < self.length:
                parts.append(os.pread(opened.fileno(), self.length - at, self.start + at))
                if not parts[-1]:
                    raise OSError(f"{self.file} ends {self.length - at} bytes too early")
                at += len(parts[-1])
            return b"".join(parts)


Piece = memoryview | Stretch
"""Bytes that must not change any more."""


class Hashing:
    """Threads that compute digests, one for each core."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(cores, thread_name_prefix="onnxpar-digest")
        self._room = threading.BoundedSemaphore(_WAITING * cores)
        self._failed: Exception | None = None

    def add(self, pieces: Sequence[Piece], done: Callable[[str], None]) -> None:
        """Computes the digest of pieces together, and calls `done` with it in a thread."""
        self._room.acquire()
        self._pool.submit(self._hash, pieces, done)

    def finish(self) -> None:
        """Waits for all digests; afterwards none can be added. Errors: OSError if a piece cannot
        be read."""
        self._pool.shutdown()
        if self._failed is not None:
            raise self._failed

    def _hash(self, pieces: Sequence[Piece], done: Callable[[str], None]) -> None:
        try:
            digest = hashlib.sha256()
            for piece in pieces:
                digest.update(piece.read() if isinstance(piece, Stretch) else piece)
            done(digest.hexdigest())
        except Exception as error:  # the outermost boundary of a thread: `finish` raises it
            self._failed = error
        finally:
            self._room.release()
