"""SHA-256 of files that must stay as they were written.

A file's digests are those of its blocks, so that a part of a large one can be checked; the file
that lists them ends with a digest of its own text, so that it stands for all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from onnxpar.errors import ModelError

BLOCK = 1 << 20
"""Bytes that one digest is of; the last block of a file may have fewer."""
SAMPLED = 8
"""Blocks of a file that are checked where not all are: the first, the last, and some between."""
Digests = Mapping[str, Any]
"""`{"bytes": 20, "sha256": ["9f86..."]}`: the size of a file, and the digest of each block."""
Block = tuple[str, int, str]
"""The name of a file, where a block of it begins, and the block's digest."""

_SEAL = re.compile(rb'"sha256": "([0-9a-f]{64})"\s*\}\s*\Z')
_UNSEALED = "0" * 64


class DigestWriter:
    """Writes to a file, and digests what it writes."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._done: list[str] = []
        self._block = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Writes bytes behind those before. Errors: OSError."""
        left = memoryview(data)
        self._sink.write(left)
        while left:
            piece = left[: BLOCK - self.size % BLOCK]
            self._block.update(piece)
            self.size += len(piece)
            if self.size % BLOCK == 0:
                self._done.append(self._block.hexdigest())
                self._block = hashlib.sha256()
            left = left[len(piece) :]

    @property
    def digests(self) -> Digests:
        """Of all that was written, as `digests_of` tells it of the file."""
        is_open = self.size % BLOCK != 0 or not self._done
        last = [self._block.hexdigest()] if is_open else []
        return {"bytes": self.size, "sha256": [*self._done, *last]}


def digests_of(files: Iterable[Path]) -> dict[str, Digests]:
    """Digests of files by name, of all their blocks. Errors: OSError."""
    sizes = {file: file.stat().st_size for file in files}
    found = _hashed((file, at) for file, size in sizes.items() for at in _blocks(size))
    return {
        file.name: {"bytes": size, "sha256": [found[file, at] for at in _blocks(size)]}
        for file, size in sizes.items()
    }


def check_files(folder: Path, wanted: Mapping[str, Digests], whole: bool, remedy: str) -> None:
    """Errors: ModelError, with the remedy, where a file has another size or content than it was
    written with. Of a large file, only some blocks are read unless it is checked as a `whole`."""
    blocks: list[Block] = []
    for name, said in wanted.items():
        check_size(folder / name, said, remedy)
        each = blocks_of({name: said})
        if not whole and len(each) > SAMPLED:
            each = [each[i * (len(each) - 1) // (SAMPLED - 1)] for i in range(SAMPLED)]
        blocks += each
    check_blocks(folder, blocks, remedy)


def blocks_of(wanted: Mapping[str, Digests]) -> list[Block]:
    """All blocks of files."""
    return [
        (name, at, digest)
        for name, said in wanted.items()
        for at, digest in zip(_blocks(said["bytes"]), said["sha256"], strict=True)
    ]


def check_blocks(folder: Path, blocks: Iterable[Block], remedy: str) -> None:
    """Errors: ModelError, with the remedy, where a block is not what was written."""
    tasks = {(folder / name, at): digest for name, at, digest in blocks}
    try:
        found = _hashed(tasks)
    except OSError as error:
        raise ModelError(f"cannot read {folder}: {error.strerror or error}") from None
    for (file, at), digest in tasks.items():
        if found[file, at] != digest:
            raise ModelError(
                f"{file} is not what was written: SHA-256 differs in the {BLOCK >> 20} MiB from "
                f"byte {at}{_then(remedy)}"
            )


def check_size(file: Path, said: Digests, remedy: str) -> None:
    """Errors: ModelError, with the remedy, for a file that is not there or has another size."""
    try:
        size = file.stat().st_size
    except OSError as error:
        text = f"cannot read {file}: {error.strerror or error}"
        raise ModelError(f"{text}{_then(remedy)}") from None
    if size != said["bytes"]:
        raise ModelError(f"{file} has {size:,} bytes, not {said['bytes']:,}{_then(remedy)}")


def check_listed(files: Mapping[str, Digests]) -> None:
    """Errors: TypeError, KeyError or ValueError for what is no list of files and digests."""
    for name, said in files.items():
        blocks = said["sha256"]
        if not isinstance(said["bytes"], int) or not all(isinstance(b, str) for b in blocks):
            raise TypeError(f"digests of {name!r}")
        if len(blocks) != max(-(-said["bytes"] // BLOCK), 1):
            raise ValueError(f"{len(blocks)} digests of {name!r}")


def _then(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""


def sealed(data: Mapping[str, Any]) -> str:
    """JSON of an object that ends with the digest of its own text (`sha256`)."""
    own = {key: value for key, value in data.items() if key != "sha256"}
    text = json.dumps({**own, "sha256": _UNSEALED}, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    head, _, tail = text.rpartition(_UNSEALED)
    return head + digest + tail


def check_seal(file: Path, text: bytes, remedy: str) -> None:
    """Errors: ModelError, with the remedy, for text that is not as `sealed` made it."""
    found = _SEAL.search(text)
    if found is not None:
        start, end = found.span(1)
        plain = text[:start] + _UNSEALED.encode() + text[end:]
        if hashlib.sha256(plain).hexdigest().encode() == found[1]:
            return
    raise ModelError(f"{file} is not what was written: its SHA-256 differs{_then(remedy)}")


def _blocks(size: int) -> range:
    """Where the blocks of a file begin; one of no bytes has one."""
    return range(0, max(size, 1), BLOCK)


def _hashed(tasks: Iterable[tuple[Path, int]]) -> dict[tuple[Path, int], str]:
    """The digests of blocks, several at a time."""
    each = list(tasks)
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), max(len(each), 1))) as pool:
        return dict(zip(each, pool.map(lambda task: _digest(*task), each), strict=True))


def _digest(file: Path, at: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as source:
        source.seek(at)
        for piece in _pieces(source, BLOCK):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(source: Any, size: int) -> Iterator[bytes]:
    while size and (piece := source.read(min(size, 1 << 20))):
        size -= len(piece)
        yield piece
