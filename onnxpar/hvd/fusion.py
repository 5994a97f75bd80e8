"""Tensor fusion: sends many arrays in few flat buffers; each result has the bits that it would have
if its array were sent alone."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.compression import Cast
from onnxpar.hvd.process_sets import Members
from onnxpar.hvd.reductions import Reduction
from onnxpar.runtime.ranks import collectives

FUSION_THRESHOLD = 64 << 20
"""The default size of a buffer, in bytes."""


def default_threshold() -> int:
    """Returns the size in bytes that the environment variable HOROVOD_FUSION_THRESHOLD sets, or
    FUSION_THRESHOLD. Errors: InputError if the variable is not a number."""
    text = os.environ.get("HOROVOD_FUSION_THRESHOLD", "")
    if text and not text.isdecimal():
        raise InputError(f"HOROVOD_FUSION_THRESHOLD={text!r} must be a number of bytes")
    return int(text) if text else FUSION_THRESHOLD


@dataclass(frozen=True)
class Tensor:
    """The name, dtype and shape of an array."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


Layout = tuple[Tensor, ...]


def layout_of(names: Sequence[str], arrays: Sequence[Array]) -> Layout:
    """Returns the names, dtypes and shapes of arrays, in their order."""
    return tuple(Tensor(n, a.dtype, a.shape) for n, a in zip(names, arrays, strict=True))


class Fusion:
    """Buffers in which the arrays of `layout` are sent and reduced, again and again.

    compression  converts arrays while they are copied into a buffer
    threshold    bytes of a buffer, in the dtype that is sent; a larger array has its own buffer
    groups       indices of arrays; each group and dtype then has a buffer of its own, of any size

    All arrays of a buffer have one dtype.
    """

    def __init__(
        self,
        layout: Layout,
        compression: Cast,
        threshold: float,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.layout = layout
        self.threshold = threshold
        wires = [compression.wire_dtype(tensor.dtype) for tensor in layout]
        sizes = [t.elements * w.itemsize for t, w in zip(layout, wires, strict=True)]
        filled = fill(wires, sizes, threshold) if groups is None else _of_groups(groups, wires)
        self.buckets = [Bucket(layout, indices, wires[indices[0]]) for indices in filled]
        about = f"a fusion threshold of {threshold}" + (f" and groups {groups}" if groups else "")
        self._text = "\n".join([about, *map(str, layout)])

    def reduce(
        self, members: Members, arrays: Sequence[Array], reduction: Reduction, name: str
    ) -> list[Array]:
        """Returns the arrays, reduced over the members, in their order: views of the buffers, which
        the next call overwrites, or new arrays. `name` is that of the call in errors. Errors:
        InputError, on every rank, if names, dtypes or shapes differ between ranks."""
        digest = agree(members, self._text, name)
        results: dict[int, Array] = {}
        for number, bucket in enumerate(self.buckets):
            bucket.reduce(
                members,
                arrays,
                reduction,
                f"{name}, bucket {number + 1} of {len(self.buckets)}",
                f"layout={digest}",
            )
            results.update(bucket.unpack())
        return [results[index] for index in range(len(arrays))]


class Bucket:
    """A buffer, and the arrays that are sent in it: those at `indices` of the layout. `wire` is the
    dtype of the buffer."""

    def __init__(self, layout: Layout, indices: Sequence[int], wire: np.dtype[Any]) -> None:
        self.indices = indices
        self._tensors = [layout[index] for index in indices]
        self._buffer: Array = np.empty(sum(t.elements for t in self._tensors), wire)
        ends = np.cumsum([tensor.elements for tensor in self._tensors])
        self._parts = [
            self._buffer[end - tensor.elements : end].reshape(tensor.shape)
            for tensor, end in zip(self._tensors, ends, strict=True)
        ]

    def reduce(
        self,
        members: Members,
        arrays: Sequence[Array],
        reduction: Reduction,
        name: str,
        details: str,
    ) -> None:
        """Copies the arrays into the buffer, and reduces the buffer over the members in place.
        Ranks compare `name` and `details`."""
        names = [tensor.name for tensor in self._tensors]
        with members.communicator.activity(names, "MEMCPY_IN_FUSION_BUFFER"):
            for part, index in zip(self._parts, self.indices, strict=True):
                np.copyto(part, arrays[index], casting="unsafe")
        with members.communicator.activity(names, "GLOO_ALLREDUCE"):
            buffer, sizes = self._buffer, [tensor.elements for tensor in self._tensors]
            reduction.all_reduce(members, buffer, name, details, buffer, sizes)

    def unpack(self) -> dict[int, Array]:
        """Returns the reduced arrays by index: views of the buffer, or copies if they were sent in
        another dtype."""
        return {
            index: part.astype(tensor.dtype, copy=False)
            for index, tensor, part in zip(self.indices, self._tensors, self._parts, strict=True)
        }


def _of_groups(
    groups: Sequence[Sequence[int]], wires: Sequence[np.dtype[Any]]
) -> Iterator[list[int]]:
    """Yields the indices of the arrays in each buffer: arrays of one group and one dtype. `wires`
    are the dtypes of all arrays."""
    for group in groups:
        for places in fill([wires[index] for index in group], [0] * len(group)):
            yield [group[place] for place in places]


def fill(
    keys: Sequence[Hashable], sizes: Sequence[int], threshold: float = math.inf
) -> list[list[int]]:
    """Returns the indices of the arrays in each buffer: arrays with equal keys, of up to
    `threshold` bytes in total, or a single larger array. `sizes` are the bytes of the arrays.

    Keys "a", "b", "a", "a" of 4, 4, 4 and 8 bytes give [[0, 2], [1], [3]] for a threshold of 8.
    """
    filled: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], float]] = {}
    for index, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        indices, used = open_.get(key, ([], 0))
        if not indices or used + size > threshold:
            indices, used = [], 0
            filled.append(indices)
        indices.append(index)
        open_[key] = indices, used + size
    return filled


def agree(members: Members, text: str, name: str) -> str:
    """Checks that all ranks have the same `text`, and returns its digest. The text lists the names,
    dtypes and shapes of the arrays in buffers: different lists can have buffers of the same size,
    so the collectives alone would not notice. Errors: InputError, on every rank."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    agreed = members.communicator.agreed
    if (members.ranks, digest) not in agreed:
        texts = collectives.gather_bytes(members.world, text.encode(), f"{name}, layout")
        first = texts[0].decode().splitlines()
        for rank, other in zip(members.ranks, texts, strict=True):
            if texts[0] != other:
                raise InputError(
                    f"{name}: {_difference(members.ranks[0], first, rank, other.decode())}"
                )
        agreed.add((members.ranks, digest))
    return digest


def _difference(root: int, first: Sequence[str], rank: int, text: str) -> str:
    """Returns the first difference between the texts of ranks `root` and `rank`, in words."""
    lines = text.splitlines()
    for mine, other in zip(first, lines, strict=False):
        if mine != other:
            return f"rank {root} has {mine}, but rank {rank} has {other}"
    return f"rank {root} has {len(first) - 1} tensors, but rank {rank} has {len(lines) - 1}"
