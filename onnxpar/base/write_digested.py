"""Writes the files of a new folder, and computes their digests while writing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from onnxpar.base.copy_part import copy_part
from onnxpar.base.digests import BLOCK, Digests
from onnxpar.base.hashing import Hashing, Piece, Stretch

Readers = Sequence[int] | None
"""The ranks that read a file; None means all ranks."""


class DigestedFolder:
    """Writes files into a folder, each from front to back, and knows their digests without reading
    them again.

    path   the folder, which must exist
    ranks  write only the files that one of these ranks reads; of other files, only compute the
           digests. None: write all files
    """

    def __init__(self, path: Path, ranks: Collection[int] | None = None) -> None:
        self.path = path
        self._ranks = None if ranks is None else frozenset(ranks)
        self._hashing = Hashing()
        self._files: dict[str, DigestedFile] = {}
        self._others: dict[str, Digests] = {}

    def file(self, name: str, readers: Readers = None) -> DigestedFile:
        """Returns the file with this name, new and empty at the first call. `readers` counts at
        that call only."""
        if name not in self._files:
            is_written = self._ranks is None or readers is None or self._ranks & {*readers}
            path = self.path / name if is_written else None
            self._files[name] = DigestedFile(self._hashing, path, readers)
        return self._files[name]

    def put(self, name: str, data: bytes, readers: Readers = None) -> None:
        """Writes a file with this content. Errors: OSError."""
        with self.file(name, readers).opened() as file:
            file.append(data)
        file.end()

    def copy(self, name: str, source: Path) -> None:
        """Writes a copy of a file. Errors: OSError."""
        with self.file(name).opened() as file:
            file.append_from(source, 0, source.stat().st_size)

    def add(self, name: str, digests: Digests) -> None:
        """Adds a file that something else writes into the folder to the list of digests."""
        self._others[name] = digests

    def digests(self) -> dict[str, Digests]:
        """Returns size and digests of all files by name, with `ranks` (the readers) unless all
        ranks read the file. Nothing can be written afterwards. Errors: OSError."""
        for file in self._files.values():
            file.end()
        self._hashing.finish()
        found = {**self._others, **{name: file.digests() for name, file in self._files.items()}}
        return dict(sorted(found.items()))


class DigestedFile:
    """A file that is written by appending. With `path` None, nothing is written, but the digests
    are computed."""

    def __init__(self, hashing: Hashing, path: Path | None, readers: Readers) -> None:
        self.size = 0
        self._hashing, self._path, self._readers = hashing, path, readers
        self._sink: int | None = None
        self._blocks: list[str] = []
        self._begun: list[Piece] = []
        """The pieces of the last block so far, which is not full yet."""

    @contextmanager
    def opened(self) -> Iterator[DigestedFile]:
        """A block during which the file is open, as `append` and `append_from` need. Errors:
        OSError."""
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
        """Appends `length` bytes of another file, from offset `start`, copied by the kernel where
        it can. Errors: OSError."""
        if self._sink is not None:
            with source.open("rb", buffering=0) as opened:
                _copy(opened.fileno(), start, self._sink, self.size, length)
        self._hash(Stretch(source, start, length))

    def align(self, unit: int) -> None:
        """Appends zeros up to a multiple of `unit` bytes. They are hashed, but reach the disk only
        with the next bytes that are appended, as a gap before them."""
        gap = -self.size % unit
        if gap:
            self._hash(memoryview(bytes(gap)))

    def end(self) -> None:
        """Hashes the last block, also the only, empty one of an empty file. Nothing can be appended
        afterwards."""
        if self._begun or not self._blocks:
            self._end_block()

    def digests(self) -> Digests:
        """Size and digests of the file, with its readers if not all ranks read it; only after
        `Hashing.finish`."""
        found: dict[str, object] = {"bytes": self.size, "sha256": list(self._blocks)}
        return found if self._readers is None else {**found, "ranks": list(self._readers)}

    def _hash(self, piece: Piece) -> None:
        """Adds bytes to the current block, and submits each block for hashing once it is full."""
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
    """Returns a copy of the bytes, so that the larger buffer behind a view of it can be freed."""
    return piece if isinstance(piece, Stretch) else memoryview(bytes(piece))


def _copy(source: int, start: int, sink: int, at: int, length: int) -> None:
    """Copies exactly `length` bytes between open files. Errors: OSError, also if the source is
    shorter."""
    done = 0
    while done < length:
        count = copy_part(source, sink, length - done, start + done, at + done)
        if not count:
            raise OSError(f"a file that is copied ends {length - done} bytes too early")
        done += count
