"""Packs elements of less than 8 bits into bytes, as ONNX files and runtimes store them: the first
element of a byte is in its lowest bits.

A NumPy array has a byte for each element, of which only the low bits count.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array

PACKED = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
"""Bits of an element, by dtype name."""


@cache
def stored_bits(dtype: np.dtype[Any]) -> int:
    """Returns the bits of an element of this dtype as files and runtimes store it: 4 for int4, 32
    for float32."""
    return PACKED.get(dtype.name) or 8 * dtype.itemsize


def unpack(data: Array, bits: int) -> Array:
    """Returns the elements that are packed in `data`, each in a byte of its own, including padding
    elements at the end. `bits` is the size of an element: `unpack([0x21], 4)` is [1, 2]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    elements: Array = (data[:, None] >> shifts & (1 << bits) - 1).reshape(-1)
    return elements


def pack(elements: Array, bits: int) -> Array:
    """Returns these elements, each in a byte of its own before, packed at `bits` bits each; the
    last byte is padded with zeros. `pack([1, 2], 4)` is [0x21]."""
    per_byte = 8 // bits
    padded = np.zeros(-(-elements.size // per_byte) * per_byte, np.uint8)
    padded[: elements.size] = elements.reshape(-1).view(np.uint8) & (1 << bits) - 1
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed: Array = np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1)
    return packed
