"""Tensor fusion: sends many arrays in few flat buffers, with the same bits in the results."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.errors import InputError
from onnxpar.hvd.communicator import Communicator
from onnxpar.hvd.compression import Compressor
from onnxpar.hvd.reductions import ReduceOp
from onnxpar.runtime import collectives

FUSION_THRESHOLD = 64 << 20
"""The default size of a buffer, in bytes."""


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
    """Buffers for the arrays that `layout` lists. Each buffer holds arrays of one dtype with up to
    `threshold` bytes in total, as they are sent, or a single larger array."""

    def __init__(self, layout: Layout, compression: Compressor, threshold: int) -> None:
        self.layout = layout
        wires = [compression.wire_dtype(tensor.dtype) for tensor in layout]
        self.buckets = [
            Bucket(layout, indices, wire) for wire, indices in _grouped(layout, wires, threshold)
        ]
        self._text = "\n".join([f"a fusion threshold of {threshold}", *map(str, layout)])

    def reduce(
        self, communicator: Communicator, arrays: Sequence[Array], op: ReduceOp, name: str
    ) -> list[Array]:
        """Returns the arrays, reduced over the ranks: views of the buffers, or new arrays.

        Errors: InputError, on every rank, if names, dtypes or shapes of the arrays differ between
        ranks.
        """
        digest = _agree(communicator, self._text, name)
        results: dict[int, Array] = {}
        for number, bucket in enumerate(self.buckets):
            bucket.reduce(
                communicator,
                arrays,
                op,
                f"{name}, bucket {number + 1} of {len(self.buckets)}",
                f"layout={digest}",
            )
            results.update(bucket.unpack())
        return [results[index] for index in range(len(arrays))]


class Bucket:
    """A buffer, and the list of arrays that are sent in it."""

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
        communicator: Communicator,
        arrays: Sequence[Array],
        op: ReduceOp,
        name: str,
        details: str,
    ) -> None:
        """Copies the arrays into the buffer, and reduces the buffer over the ranks in place."""
        for part, index in zip(self._parts, self.indices, strict=True):
            np.copyto(part, arrays[index], casting="unsafe")
        collectives.all_reduce(
            communicator.world, self._buffer, op.value, name, details, self._buffer
        )

    def unpack(self) -> dict[int, Array]:
        """Returns the reduced arrays by index: views of the buffer, or copies if they were sent in
        another dtype."""
        return {
            index: part.astype(tensor.dtype, copy=False)
            for index, tensor, part in zip(self.indices, self._tensors, self._parts, strict=True)
        }


def _grouped(
    layout: Layout, wires: Sequence[np.dtype[Any]], threshold: int
) -> list[tuple[np.dtype[Any], list[int]]]:
    """Returns, for each buffer, its dtype and the indices of its arrays."""
    filled: list[tuple[np.dtype[Any], list[int]]] = []
    open_: dict[np.dtype[Any], tuple[list[int], int]] = {}
    for index, (tensor, wire) in enumerate(zip(layout, wires, strict=True)):
        bytes_ = tensor.elements * wire.itemsize
        indices, used = open_.get(wire, ([], threshold))
        if used + bytes_ > threshold or not indices:
            indices, used = [], 0
            filled.append((wire, indices))
        indices.append(index)
        open_[wire] = indices, used + bytes_
    return filled


def _agree(communicator: Communicator, text: str, name: str) -> str:
    """Returns a digest of `text`, which lists names, dtypes and shapes, after checking that all
    ranks have the same text. Otherwise different lists could go unnoticed, because the buffers may
    have the same size. Errors: InputError, on every rank."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    if digest not in communicator.agreed:
        texts = collectives.gather_bytes(communicator.world, text.encode(), f"{name}, layout")
        first = texts[0].decode().splitlines()
        for rank, other in enumerate(texts):
            if texts[0] != other:
                raise InputError(f"{name}: {_difference(first, rank, other.decode())}")
        communicator.agreed.add(digest)
    return digest


def _difference(first: Sequence[str], rank: int, text: str) -> str:
    lines = text.splitlines()
    for mine, other in zip(first, lines, strict=False):
        if mine != other:
            return f"rank 0 has {mine}, but rank {rank} has {other}"
    return f"rank 0 has {len(first) - 1} tensors, but rank {rank} has {len(lines) - 1}"
