"""Computes SHA-256 digests in threads, while the caller goes on."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_WAITING = 4
"""Tasks per core that may wait for a thread; with more, the caller waits, so that memory stays
bounded."""


@dataclass(frozen=True)
class Stretch:
    """A range of bytes of a file, `length` from offset `start`, read only when it is hashed."""

    file: Path
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> Stretch:
        start, stop, _ = part.indices(self.length)
        return Stretch(self.file, self.start + start, stop - start)

    def read(self) -> bytes:
        """Returns the bytes. Errors: OSError, also if the file is shorter."""
        with self.file.open("rb", buffering=0) as opened:
            parts, at = list[bytes](), 0
            while at < self.length:
                parts.append(os.pread(opened.fileno(), self.length - at, self.start + at))
                if not parts[-1]:
                    raise OSError(f"{self.file} ends {self.length - at} bytes too early")
                at += len(parts[-1])
            return b"".join(parts)


Piece = memoryview | Stretch
"""Bytes to hash, in memory or in a file; they must not change until they are hashed."""


class Hashing:
    """A pool of threads, one for each core, that compute SHA-256 digests."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(cores, thread_name_prefix="onnxpar-digest")
        self._room = threading.BoundedSemaphore(_WAITING * cores)
        self._failed: Exception | None = None

    def add(self, pieces: Sequence[Piece], done: Callable[[str], None]) -> None:
        """Starts to compute one digest of all pieces, concatenated; then a thread calls `done` with
        it, in hexadecimal. Waits first while too many tasks are queued."""
        self._room.acquire()
        self._pool.submit(self._hash, pieces, done)

    def finish(self) -> None:
        """Waits until all digests are computed; nothing can be added afterwards. Errors: OSError if
        a piece could not be read."""
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
