"""Converts element types and tensor memory between NumPy, ONNX and onnxruntime."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (lets np.dtype know bfloat16 and float8_*)
import numpy as np
import onnxruntime as ort

from onnxpar.base.arrays import Array
from onnxpar.base.packing import PACKED, pack, unpack
from onnxpar.runtime.session.device import HOST

ELEMENTS: Mapping[str, tuple[int, str]] = {
    "float32": (1, "float"),
    "uint8": (2, "uint8"),
    "int8": (3, "int8"),
    "uint16": (4, "uint16"),
    "int16": (5, "int16"),
    "int32": (6, "int32"),
    "int64": (7, "int64"),
    "bool": (9, "bool"),
    "float16": (10, "float16"),
    "float64": (11, "double"),
    "uint32": (12, "uint32"),
    "uint64": (13, "uint64"),
    "bfloat16": (16, "bfloat16"),
    "float8_e4m3fn": (17, "float8e4m3fn"),
    "float8_e4m3fnuz": (18, "float8e4m3fnuz"),
    "float8_e5m2": (19, "float8e5m2"),
    "float8_e5m2fnuz": (20, "float8e5m2fnuz"),
    "uint4": (21, "uint4"),
    "int4": (22, "int4"),
    "float4_e2m1fn": (23, "float4e2m1"),
    "float8_e8m0fnu": (24, "float8e8m0"),
    "uint2": (25, "uint2"),
    "int2": (26, "int2"),
}
"""For each element type, by dtype name: its number in ONNX's TensorProto, and onnxruntime's word
for it."""

_DTYPES = {f"tensor({word})": np.dtype(name) for name, (_, word) in ELEMENTS.items()}


def tensor_type(dtype: np.dtype[Any]) -> str:
    """Returns onnxruntime's text for a dtype: `tensor(float)` for float32."""
    return f"tensor({ELEMENTS[dtype.name][1]})"


def dtype_of(tensor_type: str) -> np.dtype[Any] | None:
    """Returns the dtype of an onnxruntime type such as `tensor(float)`; None for other types than
    tensors of numbers."""
    return _DTYPES.get(tensor_type)


def is_packed(dtype: np.dtype[Any]) -> bool:
    """True if onnxruntime packs several elements of this dtype into a byte, unlike NumPy."""
    return dtype.name in PACKED


def memory_of(array: Array) -> Array:
    """Returns the array as onnxruntime has it in memory: as packed bytes for a dtype such as int4,
    else the contiguous array itself."""
    return pack(array, PACKED[array.dtype.name]) if is_packed(array.dtype) else array


def bind_input(
    binding: ort.IOBinding, name: str, array: Array, memory: Array | None = None
) -> None:
    """Binds an input to the memory of a contiguous array, without a copy; the caller must keep the
    array alive during the run.

    memory  `memory_of(array)`, required for a packed dtype
    """
    element, at = _element(array.dtype), (array if memory is None else memory).ctypes.data
    HOST.bind_input(binding, name, element, array.shape, at)


def as_fed(array: Array) -> Array | ort.OrtValue:
    """Returns the array as onnxruntime's `run` accepts it: as an OrtValue if NumPy lacks the
    dtype."""
    return array if array.dtype.isbuiltin == 1 else copy_of(array)


def bind_output(binding: ort.IOBinding, name: str, array: Array) -> None:
    """Binds an output to the memory of a contiguous array of its shape and dtype."""
    element, at = _element(array.dtype), array.ctypes.data
    HOST.bind_output(binding, name, element, array.shape, at)


def view_of(value: ort.OrtValue, dtype: np.dtype[Any]) -> Array:
    """Returns an array that shares the memory of a tensor, and must not outlive it; a copy if the
    dtype is packed."""
    shape = tuple(value.shape())
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    bits = PACKED.get(dtype.name)
    size = -(-count * bits // 8) if bits else dtype.itemsize * count
    memory = np.frombuffer((ctypes.c_ubyte * size).from_address(value.data_ptr()), np.uint8)
    if bits:
        return unpack(memory, bits)[:count].view(dtype).reshape(shape)
    return memory.view(dtype).reshape(shape)


def copy_of(array: Array) -> ort.OrtValue:
    """Returns a new OrtValue with a copy of the array, also if NumPy lacks its dtype."""
    value = HOST.allocate(array.shape, _element(array.dtype))
    memory = memory_of(np.asarray(array, order="C"))
    if memory.nbytes:
        ctypes.memmove(value.data_ptr(), memory.ctypes.data, memory.nbytes)
    return value


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ort.OrtValue:
    """Returns a new OrtValue of zeros. The system gives it memory page by page, when the pages are
    written."""
    if dtype.isbuiltin != 1:
        return copy_of(np.zeros(shape, dtype))
    return HOST.wrap(np.zeros(shape, dtype))


def _element(dtype: np.dtype[Any]) -> Any:
    """Returns a dtype as onnxruntime's calls take it: NumPy's type, or ONNX's number if NumPy lacks
    the dtype."""
    return dtype.type if dtype.isbuiltin == 1 else ELEMENTS[dtype.name][0]
