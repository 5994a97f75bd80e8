"""Converts between arrays and onnxruntime's OrtValues or bound memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.base.packing import PACKED, unpack
from onnxpar.runtime.session.device import HOST
from onnxpar.runtime.session.tensors import ELEMENTS, copy_of, dtype_of, memory_of, view_of

_NAMES = {number: name for name, (number, _) in ELEMENTS.items()}
_RAW = ort.capi._pybind_state.OrtValue
"""The native class that onnxruntime's Python class OrtValue wraps; onnxruntime's vectors contain
it."""


@dataclass(frozen=True)
class Memory:
    """The CPU memory of a contiguous tensor, at an address; its owner must keep it alive."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    address: int

    @staticmethod
    def of(element_type: Any, shape: Sequence[int], address: int) -> Memory:
        """Returns the memory that the arguments of `bind_input` describe. Errors: InputError for an
        unknown element type."""
        return Memory(element_dtype(element_type), tuple(map(int, shape)), int(address))

    def read(self) -> Array:
        """Returns the current values: an array that shares the memory, or a copy if the dtype is
        packed (int4, two in a byte)."""
        bits = PACKED.get(self.dtype.name)
        bytes_ = self._bytes()
        if bits:
            count = math.prod(self.shape)
            return unpack(bytes_, bits)[:count].view(self.dtype).reshape(self.shape)
        return bytes_.view(self.dtype).reshape(self.shape)

    def write(self, array: Array) -> None:
        """Writes an array of this dtype and shape to the memory."""
        self._bytes()[...] = memory_of(np.asarray(array, order="C")).reshape(-1).view(np.uint8)

    def _bytes(self) -> Array:
        """The memory as an array of bytes."""
        count, bits = math.prod(self.shape), PACKED.get(self.dtype.name)
        size = -(-count * bits // 8) if bits else count * self.dtype.itemsize
        if not size:
            return np.empty(0, np.uint8)
        memory: Any = (ctypes.c_ubyte * size).from_address(self.address)
        data: Array = np.frombuffer(memory, np.uint8)
        return data


def element_dtype(element_type: Any) -> np.dtype[Any]:
    """Returns the dtype for an element type as onnxruntime's calls take it: a NumPy type, or a
    number of ONNX's TensorProto. Errors: InputError for the number of a type that is not
    numeric."""
    if isinstance(element_type, int):
        if element_type not in _NAMES:
            raise InputError(f"element type {element_type} is not numeric")
        return np.dtype(_NAMES[element_type])
    dtype: np.dtype[Any] = np.dtype(element_type)
    return dtype


def is_ort_value(value: Any) -> bool:
    """True for an OrtValue, of onnxruntime's Python class or of its native class."""
    return isinstance(value, (ort.OrtValue, _RAW))


def array_of(value: Any) -> Array:
    """Returns the tensor of an OrtValue as an array, which shares its memory; a copy for strings
    and packed dtypes. Errors: InputError if the value is not a tensor in CPU memory."""
    wrapped = value if isinstance(value, ort.OrtValue) else ort.OrtValue(value)
    if not wrapped.is_tensor():
        raise InputError(f"an OrtValue of {wrapped.data_type()} cannot be fed; give a list or dict")
    if not HOST.has(wrapped.device_name()):
        raise InputError(f"an OrtValue on {wrapped.device_name()}: the ranks read CPU memory only")
    dtype = dtype_of(wrapped.data_type())
    if dtype is None:  # strings
        strings: Array = wrapped.numpy()
        return strings
    return view_of(wrapped, dtype)


def ort_value_of(name: str, value: Any, own: bool = False) -> ort.OrtValue:
    """Returns an output as an OrtValue, which shares the memory of its array; a copy if `own`, or
    for dtypes that NumPy lacks. Errors: InputError, with the output's `name`, for strings, lists
    and dicts, which onnxruntime's Python API cannot put into an OrtValue."""
    if not isinstance(value, np.ndarray) or value.dtype.kind == "O":
        raise InputError(
            f"output {name!r} is not a tensor of numbers, and cannot be an OrtValue; fetch "
            "it with run() or copy_outputs_to_cpu()"
        )
    if value.dtype.isbuiltin == 1 and not own:
        return HOST.wrap(np.ascontiguousarray(value).reshape(value.shape))
    return copy_of(value)
