"""Writes the files of a new folder, and computes their digests while they are written."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from onnxpar.base.copy_part import copy_part
from onnxpar.base.digests import BLOCK, Digests
from onnxpar.base.hashing import Hashing, Piece, Stretch

Readers = Sequence[int] | None
"""The ranks that read a file; None: all do."""


class DigestedFolder:
    """The files of a folder: they are written once, from front to back, and their digests are known
    without reading them again.

    path   the folder, which must exist
    ranks  only the files that one of these ranks reads are written, of the others only the digests
           are computed; None: all are written
    """

    def __init__(self, path: Path, ranks: Collection[int] | None = None) -> None:
        self.path = path
        self._ranks = None if ranks is None else frozenset(ranks)
        self._hashing = Hashing()
        self._files: dict[str, DigestedFile] = {}
        self._others: dict[str, Digests] = {}

    def file(self, name: str, readers: Readers = None) -> DigestedFile:
        """Returns the file of this name, which is empty at first."""
        if name not in self._files:
            is_written = self._ranks is None or readers is None or self._ranks & {*readers}
            path = self.path / name if is_written else None
            self._files[name] = DigestedFile(self._hashing, path, readers)
        return self._files[name]

    def put(self, name: str, data: bytes, readers: Readers = None) -> None:
        """Writes a whole file. Errors: OSError."""
        with self.file(name, readers).opened() as file:
            file.append(data)
        file.end()

    def copy(self, name: str, source: Path) -> None:
        """Writes a copy of a file. Errors: OSError."""
        with self.file(name).opened() as file:
            file.append_from(source, 0, source.stat().st_size)

    def add(self, name: str, digests: Digests) -> None:
        """Lists a file that something else writes to the folder."""
        self._others[name] = digests

    def digests(self) -> dict[str, Digests]:
        """Returns the digests of all files by name, with the `ranks` that read a file unless all
        do. Ends the folder: no more can be written. Errors: OSError."""
        for file in self._files.values():
            file.end()
        self._hashing.finish()
        found = {**self._others, **{name: file.digests() for name, file in self._files.items()}}
        return dict(sorted(found.items()))


class DigestedFile:
    """A file that grows at its end. `path` is None for a file that is not written."""

    def __init__(self, hashing: Hashing, path: Path | None, readers: Readers) -> None:
        self.size = 0
        self._hashing, self._path, self._readers = hashing, path, readers
        self._sink: int | None = None
        self._blocks: list[str] = []
        self._begun: list[Piece] = []
        """The pieces of the last block, which is not full."""

    @contextmanager
    def opened(self) -> Iterator[DigestedFile]:
        """Holds the file open, as appending needs. Errors: OSError."""
        if self._path is None:
            yield self
            return
        self._sink = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield self
        finally:
            os.close(self._sink)
            self._sink = None

    def append(self, data: bytes) -> None:
        """Writes bytes. Errors: OSError."""
        if self._sink is not None:
            written = 0
            while written < len(data):
                rest = memoryview(data)[written:]
                written += os.pwrite(self._sink, rest, self.size + written)
        self._hash(memoryview(data))

    def append_from(self, source: Path, start: int, length: int) -> None:
        """Writes bytes of another file, which the kernel copies. Errors: OSError."""
        if self._sink is not None:
            with source.open("rb", buffering=0) as opened:
                _copy(opened.fileno(), start, self._sink, self.size, length)
        self._hash(Stretch(source, start, length))

    def align(self, unit: int) -> None:
        """Fills the file up with zeros to a multiple of `unit` bytes; the last ones appear with
        what is written next."""
        gap = -self.size % unit
        if gap:
            self._hash(memoryview(bytes(gap)))

    def end(self) -> None:
        """Hashes what has not been: the last block, or that of an empty file. No more can be
        written."""
        if self._begun or not self._blocks:
            self._end_block()

    def digests(self) -> Digests:
        """The digests of all bytes, once the hashing is finished."""
        found: dict[str, object] = {"bytes": self.size, "sha256": list(self._blocks)}
        return found if self._readers is None else {**found, "ranks": list(self._readers)}

    def _hash(self, piece: Piece) -> None:
        """Adds a piece to the blocks, of which each full one is hashed."""
        while True:
            taken = min(BLOCK - self.size % BLOCK, len(piece))
            if not taken:
                return
            self._begun.append(piece[:taken])
            piece = piece[taken:]
            self.size += taken
            if self.size % BLOCK == 0:
                self._end_block()
            else:
                self._begun[-1] = _alone(self._begun[-1])

    def _end_block(self) -> None:
        at = len(self._blocks)
        self._blocks.append("")
        self._hashing.add(self._begun, lambda digest: self._blocks.__setitem__(at, digest))
        self._begun = []


def _alone(piece: Piece) -> Piece:
    """The same bytes, without the memory of which they are a part: the block may stay for long."""
    return piece if isinstance(piece, Stretch) else memoryview(bytes(piece))


def _copy(source: int, start: int, sink: int, at: int, length: int) -> None:
    """Copies bytes between open files. Errors: OSError, also if the source ends."""
    done = 0
    while done < length:
        count = copy_part(source, sink, length - done, start + done, at + done)
        if not count:
            raise OSError(f"a file that is copied ends {length - done} bytes too early")
        done += count
