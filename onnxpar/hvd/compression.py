"""Compression of the arrays that ranks send in a reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.hvd.reductions import is_float


@dataclass(frozen=True)
class Compressor:
    """Sends float32 and float64 arrays in the dtype `wire`; None sends all arrays as they are."""

    wire: str | None

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype in which an array of `dtype` is sent."""
        if self.wire is None or not is_float(dtype) or dtype.itemsize <= 2:
            return dtype
        return _named(self.wire)

    def compress(self, array: Array) -> tuple[Array, np.dtype[Any]]:
        """The array to send, and the original dtype, for `decompress`."""
        return array.astype(self.wire_dtype(array.dtype), copy=False), array.dtype

    def decompress(self, array: Array, dtype: np.dtype[Any]) -> Array:
        """A received array in its original dtype."""
        return array.astype(dtype, copy=False)


class Compression:
    """Sends float32 and float64 arrays in 16 bits: float16 is more precise, bfloat16 does not
    overflow.

    The ranks' values are added in float32, and the result is rounded to 16 bits again.
    """

    none: ClassVar[Compressor] = Compressor(None)
    fp16: ClassVar[Compressor] = Compressor("float16")
    bf16: ClassVar[Compressor] = Compressor("bfloat16")


def _named(name: str) -> np.dtype[Any]:
    import ml_dtypes  # noqa: F401  (lets np.dtype know bfloat16)

    return np.dtype(name)
