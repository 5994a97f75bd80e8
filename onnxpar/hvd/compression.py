"""Compression of the arrays that ranks send in a reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.hvd.reductions import is_float


class Compressor(Protocol):
    """A compression: an attribute of `Compression`, or a class or object of your own with these two
    methods."""

    def compress(self, tensor: Array) -> tuple[Array, Any]:
        """Returns the array to send, and the context that `decompress` needs."""

    def decompress(self, tensor: Array, ctx: Any) -> Array:
        """Returns a received array in its original form."""


@dataclass(frozen=True)
class Cast:
    """Converts float32 and float64 arrays to the dtype `wire` for sending; None sends arrays
    unchanged."""

    wire: str | None

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Returns the dtype in which an array of `dtype` is sent."""
        if self.wire is None or not is_float(dtype) or dtype.itemsize <= 2:
            return dtype
        return _named(self.wire)

    def compress(self, tensor: Array) -> tuple[Array, np.dtype[Any]]:
        """Returns the array to send, and the original dtype for `decompress`."""
        return tensor.astype(self.wire_dtype(tensor.dtype), copy=False), tensor.dtype

    def decompress(self, tensor: Array, ctx: np.dtype[Any]) -> Array:
        """Returns a received array, converted to its original dtype."""
        return tensor.astype(ctx, copy=False)


class Compression:
    """Choices for sending float32 and float64 arrays in 16 bits: float16 is more precise, bfloat16
    has the range of float32.

    Values are added in float32, and the result is rounded to 16 bits again.
    """

    none: ClassVar[Cast] = Cast(None)
    fp16: ClassVar[Cast] = Cast("float16")
    bf16: ClassVar[Cast] = Cast("bfloat16")


Restore = Callable[[list[Array]], list[Array]]


def prepared(
    compression: Compressor, arrays: Sequence[Array]
) -> tuple[Cast, Sequence[Array], Restore]:
    """Returns the dtypes in which to send arrays, the arrays to send, and a function that restores
    received ones: a `Cast` converts where arrays are copied into a buffer, others beforehand."""
    if isinstance(compression, Cast):
        return compression, arrays, lambda received: received
    pairs = [compression.compress(array) for array in arrays]
    wires = [np.asarray(wire, order="C") for wire, _ in pairs]

    def restore(received: list[Array]) -> list[Array]:
        contexts = [context for _, context in pairs]
        return [compression.decompress(w, c) for w, c in zip(received, contexts, strict=True)]

    return Compression.none, wires, restore


def _named(name: str) -> np.dtype[Any]:
    import ml_dtypes  # noqa: F401  (lets np.dtype know bfloat16)

    return np.dtype(name)
