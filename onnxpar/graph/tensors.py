"""Shapes, dtypes and bytes of a graph's tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.base.packing import stored_bits

Size = int | None
"""Size of a dimension; None if it is data-dependent."""
Whole = Mapping[str, Collection[str] | None]
"""Factors that a node must not split, by the name of its first result; None for all of them."""


def tensor_shape(tensor: gs.Tensor) -> tuple[Size, ...] | None:
    """The shape of a tensor, with None for unknown sizes; None if the rank is unknown."""
    shape = tensor.shape
    if shape is None:
        return None
    return tuple(int(s) if isinstance(s, (int, np.integer)) else None for s in shape)


def numel(shape: Sequence[Size]) -> int:
    """The number of elements; an unknown dimension counts as 1."""
    return math.prod(s or (1 if s is None else 0) for s in shape)


def constant(tensor: gs.Tensor) -> np.ndarray[Any, Any] | None:
    """The value of a constant operand; None if it is computed or fed."""
    if isinstance(tensor, gs.Constant):
        return np.asarray(tensor.values)
    return None


def given(node: gs.Node, index: int) -> gs.Tensor | None:
    """An optional operand; None if it is left out."""
    return node.inputs[index] if index < len(node.inputs) and node.inputs[index].name else None


def float_attr(node: gs.Node, attribute: str, default: float) -> float:
    """A number among a node's attributes (or the default) as kernels read it: in float32."""
    return float(np.float32(node.attrs.get(attribute, default)))


def numpy_dtype(tensor: gs.Tensor) -> np.dtype[Any]:
    """The tensor's dtype in NumPy; bfloat16 and similar types are from ml_dtypes."""
    dtype = tensor.dtype
    if isinstance(dtype, int):
        dtype = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    known: np.dtype[Any] = np.dtype(dtype)
    return known


def dtype_of(tensor: gs.Tensor) -> np.dtype[Any] | None:
    """The tensor's dtype in NumPy (or ml_dtypes); None if it is unknown."""
    return None if tensor.dtype is None else numpy_dtype(tensor)


def is_float(tensor: gs.Tensor) -> bool:
    """True for the floating-point types in which sums are computed."""
    return str(dtype_of(tensor)) in ("float16", "bfloat16", "float32", "float64")


def shape_bytes(tensor: gs.Tensor, shape: Sequence[int]) -> int:
    """Bytes of a shard of this shape."""
    return math.ceil(math.prod(shape) * element_bytes(tensor))


def element_bytes(tensor: gs.Tensor) -> float:
    """Bytes of an element, less than 1 for packed types; 4 if the type is unknown."""
    return stored_bits(numpy_dtype(tensor)) / 8 if tensor.dtype is not None else 4.0
