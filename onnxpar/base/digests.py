"""SHA-256 digests of files that must not change after they were written.

Each block of a file has a digest, so that a part of a large file can be checked. The file that
lists the digests ends with a digest of its own text, so that it protects all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from onnxpar.base.bundle_names import check_inner
from onnxpar.base.errors import ModelError

BLOCK = 1 << 20
"""Bytes of a block with one digest; the last block of a file may be smaller."""
SAMPLED = 8
"""Number of blocks of a file in a partial check: the first, the last, and some between."""
Digests = Mapping[str, Any]
"""`{"bytes": 20, "sha256": ["9f86..."]}`: the size of a file, and the digest of each block."""
Block = tuple[str, int, str]
"""The name of a file, the offset of a block in it, and the block's digest."""

_SEAL = re.compile(rb'"sha256": "([0-9a-f]{64})"\s*\}\s*\Z')
_UNSEALED = "0" * 64


class DigestWriter:
    """Writes to a file, and computes the digests of the written bytes on the way."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._done: list[str] = []
        self._block = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes. Errors: OSError."""
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
        """The digests of everything written so far, as `digests_of` computes them."""
        is_open = self.size % BLOCK != 0 or not self._done
        last = [self._block.hexdigest()] if is_open else []
        return {"bytes": self.size, "sha256": [*self._done, *last]}


def digests_of(files: Iterable[Path]) -> dict[str, Digests]:
    """Returns size and digests of each file, by file name. Errors: OSError."""
    sizes = {file: file.stat().st_size for file in files}
    found = _hashed((file, at) for file, size in sizes.items() for at in _blocks(size))
    return {
        file.name: {"bytes": size, "sha256": [found[file, at] for at in _blocks(size)]}
        for file, size in sizes.items()
    }


def check_files(folder: Path, wanted: Mapping[str, Digests], whole: bool, remedy: str) -> None:
    """Checks files of a folder against their sizes and digests: all blocks if `whole`, else at most
    SAMPLED blocks per file.

    wanted  size and digests by file name, as `digests_of` returns them
    remedy  the end of error messages, such as "write the checkpoint again"; may be empty

    Errors: ModelError if a file is missing, or its size or content has changed.
    """
    blocks: list[Block] = []
    for name, digests in wanted.items():
        check_size(folder / name, digests, remedy)
        each = blocks_of({name: digests})
        if not whole and len(each) > SAMPLED:
            each = [each[i * (len(each) - 1) // (SAMPLED - 1)] for i in range(SAMPLED)]
        blocks += each
    check_blocks(folder, blocks, remedy)


def blocks_of(wanted: Mapping[str, Digests]) -> list[Block]:
    """Returns all blocks of these files as a flat list of (file name, offset, digest)."""
    return [
        (name, at, digest)
        for name, digests in wanted.items()
        for at, digest in zip(_blocks(digests["bytes"]), digests["sha256"], strict=True)
    ]


def check_blocks(folder: Path, blocks: Iterable[Block], remedy: str) -> None:
    """Reads blocks and compares their digests. Errors: ModelError, which ends with `remedy`, if a
    block has changed or cannot be read."""
    tasks = {(folder / name, at): digest for name, at, digest in blocks}
    try:
        found = _hashed(tasks)
    except OSError as error:
        raise ModelError(f"cannot read {folder}: {error.strerror or error}") from None
    for (file, at), digest in tasks.items():
        if found[file, at] != digest:
            raise ModelError(
                f"{file} has changed since it was written: SHA-256 differs in the "
                f"{BLOCK >> 20} MiB from byte {at}{_and(remedy)}"
            )


def check_size(file: Path, digests: Digests, remedy: str) -> None:
    """Checks that a file exists and has the size in `digests`. Errors: ModelError, which ends with
    `remedy`."""
    try:
        status = file.stat()
    except OSError as error:
        text = f"cannot read {file}: {error.strerror or error}"
        raise ModelError(f"{text}{_and(remedy)}") from None
    if not stat.S_ISREG(status.st_mode):  # whoever opened a pipe would wait for a writer
        raise ModelError(f"{file} is not a file{_and(remedy)}")
    if status.st_size != digests["bytes"]:
        sizes = f"{status.st_size:,} bytes, not {digests['bytes']:,}"
        raise ModelError(f"{file} has {sizes}{_and(remedy)}")


def check_listed(files: Mapping[str, Digests]) -> None:
    """Checks the form of a list of files and digests that was read from a file; does not read the
    listed files. Errors: TypeError, KeyError or ValueError if the list is malformed, or names a
    file outside of the folder."""
    for name, digests in files.items():
        check_inner(name)
        blocks, ranks = digests["sha256"], digests.get("ranks", [])
        if not isinstance(digests["bytes"], int) or not all(isinstance(b, str) for b in blocks):
            raise TypeError(f"digests of {name!r}")
        if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
            raise TypeError(f"ranks of {name!r}")
        if len(blocks) != max(-(-digests["bytes"] // BLOCK), 1):
            raise ValueError(f"{len(blocks)} digests of {name!r}")


def _and(remedy: str) -> str:
    """The end of a message: `; ` and the remedy, or nothing if the remedy is empty."""
    return f"; {remedy}" if remedy else ""


def sealed(data: Mapping[str, Any]) -> str:
    """Returns the JSON text of an object, with a last entry `sha256` that protects the text itself:
    the digest of the text in which this entry is 64 zeros."""
    own = {key: value for key, value in data.items() if key != "sha256"}
    text = json.dumps({**own, "sha256": _UNSEALED}, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    head, _, tail = text.rpartition(_UNSEALED)
    return head + digest + tail


def check_seal(file: Path, text: bytes, remedy: str) -> None:
    """Checks that a text is as `sealed` returned it. Errors: ModelError, which names `file` and
    ends with `remedy`, if the text has changed."""
    found = _SEAL.search(text)
    if found is not None:
        start, end = found.span(1)
        plain = text[:start] + _UNSEALED.encode() + text[end:]
        if hashlib.sha256(plain).hexdigest().encode() == found[1]:
            return
    raise ModelError(f"{file} has changed since it was written: SHA-256 differs{_and(remedy)}")


def file_sum(file: Path) -> str:
    """Returns the SHA-256 of the content of a file, in hexadecimal. Errors: OSError."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as source:
        for piece in _pieces(source, file.stat().st_size):
            digest.update(piece)
    return digest.hexdigest()


def _blocks(size: int) -> range:
    """The offsets of the blocks of a file with `size` bytes; an empty file has one block, at 0."""
    return range(0, max(size, 1), BLOCK)


_FEW = 2
"""Up to this number of blocks, one thread reads all of them."""


def _hashed(tasks: Iterable[tuple[Path, int]]) -> dict[tuple[Path, int], str]:
    """Returns the digest of each block, given as (file, offset); computes several in parallel."""
    each = list(tasks)
    if len(each) <= _FEW:
        return {task: _digest(*task) for task in each}
    from concurrent.futures import ThreadPoolExecutor  # takes longer to import than to read so few

    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), len(each))) as pool:
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
