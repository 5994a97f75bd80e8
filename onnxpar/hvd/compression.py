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
        """Returns the array to send, and a context: anything that `decompress` needs to restore
        it."""

    def decompress(self, tensor: Array, ctx: Any) -> Array:
        """Returns a received array in its original form. `ctx` is the context that `compress`
        returned."""


@dataclass(frozen=True)
class Cast:
    """A compression that sends float32 and float64 arrays in the dtype `wire`, such as "float16".
    With None, arrays are sent unchanged."""

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
    """Compressions to choose from: `none`, or float32 and float64 arrays sent in 16 bits. float16
    (`fp16`) is more precise, bfloat16 (`bf16`) has the range of float32.

    Values are added in float32, and the result is rounded to 16 bits again.
    """

    none: ClassVar[Cast] = Cast(None)
    fp16: ClassVar[Cast] = Cast("float16")
    bf16: ClassVar[Cast] = Cast("bfloat16")


Restore = Callable[[list[Array]], list[Array]]


def prepared(
    compression: Compressor, arrays: Sequence[Array]
) -> tuple[Cast, Sequence[Array], Restore]:
    """Returns what is needed to send `arrays` with a compression:

    Cast     the conversion to do while arrays are copied into a buffer
    arrays   the arrays to send: unchanged for a `Cast`, compressed already by any other compressor
    Restore  a function from the received arrays to arrays in their original form
    """
    if isinstance(compression, Cast):
        return compression, arrays, lambda received: received
    pairs = [compression.compress(array) for array in arrays]
    wires = [np.asarray(wire, order="C") for wire, _ in pairs]

    def restore(received: list[Array]) -> list[Array]:
        contexts = [context for _, context in pairs]
        return [compression.decompress(w, c) for w, c in zip(received, contexts, strict=True)]

    return Compression.none, wires, restore


def _named(name: str) -> np.dtype[Any]:
    """Returns the dtype of a name, such as "float16" or "bfloat16"."""
    import ml_dtypes  # noqa: F401  (lets np.dtype know bfloat16)

    return np.dtype(name)
