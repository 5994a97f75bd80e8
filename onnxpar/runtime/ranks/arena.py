"""Memory that processes share: an anonymous file with arrays, which grows on demand."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from onnxpar.base.arrays import Array

ALIGNMENT = 64
"""Alignment of every array, in bytes: a cache line, and more than any kernel needs."""
PAGE = mmap.PAGESIZE

NOWHERE = -1
"""The offset of a Slot whose value is not in an arena."""

Spec = tuple[np.dtype[Any], tuple[int, ...]]
"""(dtype, shape) of an array."""


class Slot(NamedTuple):
    """An array that a rank returns, and its offset in bytes in the arena that ranks and session
    share. The offset is NOWHERE for values that are not tensors of numbers, such as strings."""

    offset: int
    array: Array


class Room(Protocol):
    """Memory in which a rank places its outputs: an Arena, which the session shares, or a Heap."""

    def place(self, specs: Sequence[Spec]) -> list[Slot]: ...


class Heap:
    """Memory of this process alone, where every array is new."""

    def place(self, specs: Sequence[Spec]) -> list[Slot]:
        """Returns new arrays of these dtypes and shapes."""
        return [Slot(0, np.empty(shape, dtype)) for dtype, shape in specs]


class Arena:
    """Arrays in a file without a name, which processes share, and which is deleted when the last
    process closes it.

    The process that places arrays grows the file and sends the new size to the others, which map
    it. The file never shrinks, so that no access can fault. After `clear`, new arrays overwrite old
    ones.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory: Array = np.empty(0, np.uint8)
        self._end = 0

    @property
    def size(self) -> int:
        """The number of bytes of the file that are mapped in this process."""
        return self._memory.nbytes

    def clear(self) -> None:
        """Makes `place` begin at the start of the file again, over the arrays placed earlier."""
        self._end = 0

    def place(self, specs: Sequence[Spec]) -> list[Slot]:
        """Returns memory for arrays of these dtypes and shapes, behind the arrays placed earlier;
        grows the file if necessary."""
        offsets = []
        for dtype, shape in specs:
            offsets.append(self._end)
            self._end += -(-_nbytes(dtype, shape) // ALIGNMENT) * ALIGNMENT
        if self._end > self.size:
            size = -(-max(self._end, self.size * 3 // 2) // PAGE) * PAGE
            os.ftruncate(self.fd, size)
            self.map(size)
        return [Slot(o, self.view(o, *spec)) for o, spec in zip(offsets, specs, strict=True)]

    def map(self, size: int) -> None:
        """Maps at least `size` bytes of the file in this process; the file must have that size
        already."""
        if size > self.size:
            self._memory = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)

    def view(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns the array of this dtype and shape that lies at an offset in bytes."""
        array: Array = np.ndarray(shape, dtype, self._memory, offset)
        return array

    def forget(self) -> None:
        """Drops this process's mapping, which ends with the last array in it. The caller closes the
        file."""
        self._memory = np.empty(0, np.uint8)


def _nbytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)
