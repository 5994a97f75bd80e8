"""Compression of the arrays that ranks send in a reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.hvd.reductions import is_float


@dataclass(frozen=True)
class Compressor:
    """Converts float32 and float64 arrays to the dtype `wire` for sending; None sends arrays
    unchanged."""

    wire: str | None

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Returns the dtype in which an array of `dtype` is sent."""
        if self.wire is None or not is_float(dtype) or dtype.itemsize <= 2:
            return dtype
        return _named(self.wire)

    def compress(self, array: Array) -> tuple[Array, np.dtype[Any]]:
        """Returns the array to send, and the original dtype for `decompress`."""
        return array.astype(self.wire_dtype(array.dtype), copy=False), array.dtype

    def decompress(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """Returns a received array, converted to its original dtype."""
        return array.astype(dtype, copy=False)


class Compression:
    """Choices for sending float32 and float64 arrays in 16 bits: float16 is more precise, bfloat16
    has the range of float32.

    Values are added in float32, and the result is rounded to 16 bits again.
    """

    none: ClassVar[Compressor] = Compressor(None)
    fp16: ClassVar[Compressor] = Compressor("float16")
    bf16: ClassVar[Compressor] = Compressor("bfloat16")


def _named(name: str) -> np.dtype[Any]:
    import ml_dtypes  # noqa: F401  (lets np.dtype know bfloat16)

    return np.dtype(name)
