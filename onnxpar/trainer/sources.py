"""Where the samples of an epoch come from, and in which order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.base.unreadable import cannot_read
from onnxpar.trainer.needs import Chunk, Needs

_DIGESTED = 1 << 28
"""Most bytes of data that a digest reads completely."""
_BLOCK = 1 << 16
"""Bytes that the digest of a larger file reads at each of its sampled places."""
Take = Callable[[Array], Chunk]
"""A function from numbers of samples to these samples, as arrays by input name."""


class Source(Protocol):
    """The samples of an epoch, which can be read again for each epoch."""

    @property
    def count(self) -> int | None:
        """The number of samples; None if only the end of an epoch tells."""

    def digest(self) -> str:
        """Returns a digest of the samples, by which a run that resumes notices other data; "" if
        there is none."""

    def chunks(self, number: int, seed: int | None, first: int, size: int) -> Iterator[Chunk]:
        """Yields the samples of epoch `number` without its `first` ones, in chunks of up to `size`.
        `seed` decides their order; None: unshuffled."""


@dataclass(frozen=True)
class Shard:
    """Some of the samples. `open` reads the shard, and returns a function that takes samples by
    number; the shard's memory is freed when that function is dropped."""

    count: int
    open: Callable[[], Take]


@dataclass(frozen=True)
class Shards:
    """The samples of several shards, of which one is open at a time. The seed decides the order of
    shards, and of samples in each shard."""

    shards: Sequence[Shard]
    make_digest: Callable[[], str]

    @property
    def count(self) -> int:
        """The number of samples."""
        return sum(shard.count for shard in self.shards)

    def digest(self) -> str:
        """Returns a digest of the samples."""
        return self.make_digest()

    def chunks(self, number: int, seed: int | None, first: int, size: int) -> Iterator[Chunk]:
        """Yields the samples of an epoch; the parameters are those of `Source.chunks`."""
        draw = None if seed is None else np.random.default_rng([seed, number])
        each = np.arange(len(self.shards))
        for i in each if draw is None else draw.permutation(each):
            shard = self.shards[int(i)]
            rows = np.arange(shard.count) if draw is None else draw.permutation(shard.count)
            if first < len(rows):
                yield from _opened(shard, rows[first:], size)
            first = max(first - len(rows), 0)


def _opened(shard: Shard, rows: Array, size: int) -> Iterator[Chunk]:
    """Opens a shard, and yields its samples with the numbers `rows` in chunks of up to `size`. A
    function of its own, so that the shard is dropped before the next one is opened."""
    take = shard.open()
    for start in range(0, len(rows), size):
        yield take(rows[start : start + size])


def in_memory(chunk: Chunk, needs: Needs) -> Shards:
    """Returns the samples of arrays in memory as one shard."""
    shard = Shard(needs.count(chunk) if needs.dims else 0, lambda: partial(needs.take, chunk))
    return Shards([shard], lambda: _digest_of_arrays(chunk, needs))


def _digest_of_arrays(arrays: Chunk, needs: Needs) -> str:
    """Returns a digest of arrays: of every byte up to 256 MiB, else of 4,096 samples."""
    digest = hashlib.sha256()
    is_large = sum(a.nbytes for a in arrays.values()) > _DIGESTED
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        parts = array
        if is_large and name in needs.dims:
            at = np.linspace(0, needs.count(arrays) - 1, 4096).astype(np.int64)
            parts = np.take(array, at, needs.dims[name])
        digest.update(np.ascontiguousarray(parts).tobytes())
    return digest.hexdigest()[:16]


def check_unchanged(file: Path, is_same: bool) -> None:
    """Errors: InputError unless `is_same`: the file has changed since the run began."""
    if not is_same:
        raise InputError(f"{file} has changed since the run began; begin the run again")


def digest_of_files(files: Sequence[Path], root: Path, needs: Needs) -> str:
    """Returns a digest of the names, sizes and bytes of files, and of how their samples are filled:
    of every byte up to 256 MiB, else of 4,096 places. Errors: InputError."""
    digest = hashlib.sha256(str(sorted(needs.pad.items())).encode())
    blocks = max(4096 // len(files), 2)
    for file in files:
        try:
            size = os.stat(file).st_size
            digest.update(f"{file.relative_to(root)} {size}".encode())
            with file.open("rb", buffering=0) as source:
                if size <= _DIGESTED // len(files):
                    digest.update(source.read())
                    continue
                for at in np.linspace(0, max(size - _BLOCK, 0), blocks).astype(np.int64):
                    source.seek(int(at))
                    digest.update(source.read(_BLOCK))
        except OSError as error:
            raise InputError(cannot_read(file, error)) from error
    return digest.hexdigest()[:16]
