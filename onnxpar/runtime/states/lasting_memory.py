"""Memory for inputs that a session shares with its ranks, so that ranks read arrays in it without a
copy, in run after run."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.runtime.ranks.arena import ALIGNMENT, PAGE


class LastingMemory:
    """Arrays in a file without a name, which ranks map, too. The memory of an array is reused when
    nobody uses the array any more; the file never shrinks, so that no access can fault."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = 0
        """The size of the file in bytes."""
        self._blocks: dict[int, tuple[int, int]] = {}
        self._free: dict[int, list[int]] = defaultdict(list)

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns a new array in the file, whose contents are arbitrary."""
        count = -(-max(dtype.itemsize * math.prod(shape), 1) // PAGE) * PAGE
        if self._free[count]:
            offset = self._free[count].pop()
        else:
            offset = self.size
            os.ftruncate(self.fd, offset + count)
            self.size = offset + count
        memory = np.frombuffer(mmap.mmap(self.fd, count, offset=offset), np.uint8)
        address = memory.ctypes.data
        self._blocks[address] = offset, count
        weakref.finalize(memory, self._release, address).atexit = False
        array: Array = np.ndarray(shape, dtype, memory)
        return array

    def place(self, array: Array) -> int | None:
        """Returns the offset of an array in the file; None if the array is elsewhere, not
        contiguous, or not aligned as ranks need it."""
        if not self._blocks or not array.flags.c_contiguous:
            return None
        at = array.ctypes.data
        for address, (offset, count) in [*self._blocks.items()]:  # an array may end meanwhile
            if 0 <= at - address <= count - array.nbytes:
                place = offset + at - address
                return None if place % ALIGNMENT else place
        return None

    def places(self, arrays: Mapping[str, Any]) -> dict[str, int]:
        """Returns the offsets of the arrays that are in the file, by name."""
        if not self._blocks:
            return {}
        offsets = {n: self.place(a) for n, a in arrays.items() if isinstance(a, np.ndarray)}
        return {name: at for name, at in offsets.items() if at is not None}

    def _release(self, address: int) -> None:
        """Makes the memory at an address free for other arrays of its size."""
        offset, count = self._blocks.pop(address)
        self._free[count].append(offset)
