"""Weights in files: mapped, compared byte by byte, and let go of."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError

COMPARED = ("all", "sample", "none")
"""How much of the weights in files is compared."""
BLOCK = 8 << 20
"""The most bytes that are compared at a time."""
MOST_MAPPED = 256 << 20
"""The bytes that may stay in memory after they are compared."""
_ROWS = 8
"""The rows of each dimension that a sample compares."""
_PACKED = ("INT2", "UINT2", "INT4", "UINT4", "FLOAT4E2M1", "FLOAT6E2M3", "FLOAT6E3M2")


class WeightFiles:
    """The files with weights of a model and of its ranks, each mapped once. `compared` is for
    results of comparisons."""

    def __init__(self) -> None:
        self.compared: dict[Any, Any] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._touched = 0

    def read(self, tensor: TensorProto, folder: Path) -> Array:
        """A tensor that is stored in a file beside the model. Errors: ModelError."""
        where = {entry.key: entry.value for entry in tensor.external_data}
        try:
            name, offset = where.get("location", ""), int(where.get("offset", 0))
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
            if min(tensor.dims, default=0) < 0:
                raise ValueError("a size is negative")
            count = math.prod(tensor.dims)
            path = (folder / name).resolve()
            if not path.is_relative_to(folder.resolve()):
                raise ModelError(f"{tensor.name}: the file {name!r:.80} is in another folder")
            if not path.is_file():
                raise ValueError("it is not there, or not a file")
            packed = numpy_helper.to_array if _is_packed(tensor) else None
            length = int(where.get("length", -1)) if packed else count * dtype.itemsize
            data = np.frombuffer(self._map(path) if length else b"", np.uint8, length, offset)
        except (KeyError, OSError, ValueError, OverflowError, RuntimeError) as error:
            text = f"{tensor.name} cannot be read from {where.get('location', '')!r:.80}: {error}"
            raise ModelError(f"{folder}: {text}") from None
        if packed:
            own = TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=bytes(data))
            return np.asarray(packed(own))
        return data.view(dtype).reshape(tuple(tensor.dims))

    def is_same(
        self, own: Array, whole: Array, spans: Sequence[Array], compared: str = "all"
    ) -> bool:
        """True if an array has the bytes of another at these positions of each dimension; with
        `sample`, of some rows alone."""
        if own.dtype != whole.dtype or own.shape != tuple(map(len, spans)):
            return False
        if own.size and not any((*own.strides, *whole.strides)):  # each is one number, repeated
            fits = (0 <= s.min() <= s.max() < n for s, n in zip(spans, whole.shape, strict=True))
            return all(fits) and bool(own.flat[0] == whole.flat[0])
        if compared == "sample" and own.nbytes > BLOCK:
            *chosen, _ = (_some(len(span)) for span in spans)
            index = *chosen, np.arange(own.shape[-1])
            own = own[np.ix_(*index)]
            spans = [span[i] for span, i in zip(spans, index, strict=True)]
        return self._is_same(own, whole, spans)

    def _is_same(self, own: Array, whole: Array, spans: Sequence[Array]) -> bool:
        if own.nbytes > BLOCK and own.dtype != object:
            if len(own) == 1:
                return self._is_same(own[0], whole[spans[0][0]], spans[1:])
            half = len(own) // 2
            first, second = ([span, *spans[1:]] for span in (spans[0][:half], spans[0][half:]))
            return self._is_same(own[:half], whole, first) and self._is_same(
                own[half:], whole, second
            )
        is_same = bool(np.array_equal(_raw(own), _raw(whole[_index(spans)])))
        self._touched += 2 * own.nbytes
        if self._touched > MOST_MAPPED:
            self._touched = 0
            for each in self._maps.values():
                each.madvise(mmap.MADV_DONTNEED)
        return is_same

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[path]


def _is_packed(tensor: TensorProto) -> bool:
    """True for elements of less than a byte."""
    return bool(TensorProto.DataType.Name(tensor.data_type) in _PACKED)


def _some(size: int) -> Array:
    return np.unique(np.linspace(0, max(size - 1, 0), _ROWS).astype(np.int64))[:size]


def same_numbers(own: Array, whole: Array, spans: Sequence[Array]) -> bool:
    """True if an array has the numbers of another at these positions, but for the rounding of what
    computed both. Where numbers change their sign, as sines do, one near zero may lose
    bits."""
    if own.dtype != whole.dtype or own.dtype.kind != "f" or own.shape != tuple(map(len, spans)):
        return False
    part = whole[_index(spans)]
    error = 4 * float(np.finfo(own.dtype).eps)
    finite = whole[np.isfinite(whole)]
    low, high = float(finite.min(initial=0)), float(finite.max(initial=0))
    scale = min(max(high, -low), 1) if low < 0 < high else 0
    return bool(np.allclose(own, part, rtol=error, atol=error * scale, equal_nan=True))


def _raw(array: Array) -> Array:
    if array.dtype == object:
        return array
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _index(spans: Sequence[Array]) -> tuple[Array | slice, ...]:
    """An index of the elements at these positions: slices where positions are contiguous."""
    slices = []
    for span in spans:
        if len(span) and not (np.diff(span) == 1).all():
            return np.ix_(*spans)
        slices.append(slice(int(span[0]), int(span[-1]) + 1) if len(span) else slice(0, 0))
    return tuple(slices)
