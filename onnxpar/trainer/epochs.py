"""The batches of an epoch, checked to be the same in all processes of a run."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.trainer.data import Data
from onnxpar.trainer.together import Together


def batches(
    together: Together, data: Data, epoch: int, seed: int | None, first: int = 0
) -> Iterator[dict[str, Array]]:
    """Yields the batches of an epoch, after its `first` samples, as arrays by input name. Data
    without a digest, such as a loader that shuffles, may give the processes of a run different
    samples, so the processes compare each batch. Errors: InputError if they differ."""
    in_epoch = data.epoch(epoch, seed, first)
    is_compared = together.size > 1 and not data.digest
    while True:
        batch = next(in_epoch, None)
        if is_compared:
            check_same(together, None if batch is None else _checksum(batch))
        if batch is None:
            return
        yield batch


def _checksum(batch: Mapping[str, Array]) -> int:
    """Returns a CRC-32 of all arrays of a batch."""
    checksum = 0
    for _, array in sorted(batch.items()):
        checksum = zlib.crc32(array.tobytes(), checksum)
    return checksum


def check_same(together: Together, own: Any) -> None:
    """Checks that all processes of a run pass the same value `own`, such as a checksum of what they
    have read. Errors: InputError in all processes."""
    each = together.each(own)
    odd = next((rank for rank, other in enumerate(each) if other != each[0]), None)
    if odd is not None:
        raise InputError(
            f"rank {odd} reads other samples than rank 0; give every rank the same data, in the "
            "same order (a loader that shuffles needs the same seed on each)"
        )


def with_ends(items: Iterator[dict[str, Array]]) -> Iterator[tuple[dict[str, Array], bool]]:
    """Yields (batch, True if it is the last one)."""
    batch = next(items, None)
    while batch is not None:
        following = next(items, None)
        yield batch, following is None
        batch = following
