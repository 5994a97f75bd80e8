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
"""The size of a dimension; None if it is known only during a run."""
Whole = Mapping[str, Collection[str] | None]
"""For nodes, by the name of their first result: the factors that they must not split; None: all of
them."""


def tensor_shape(tensor: gs.Tensor) -> tuple[Size, ...] | None:
    """Returns the shape of a tensor, with None for unknown sizes; None if the number of dimensions
    is unknown."""
    shape = tensor.shape
    if shape is None:
        return None
    return tuple(int(s) if isinstance(s, (int, np.integer)) else None for s in shape)


def numel(shape: Sequence[Size]) -> int:
    """Returns the number of elements of a shape, in which an unknown size counts as 1."""
    return math.prod(s or (1 if s is None else 0) for s in shape)


def constant(tensor: gs.Tensor) -> np.ndarray[Any, Any] | None:
    """Returns the value of a constant operand; None for an operand that is computed or fed."""
    if isinstance(tensor, gs.Constant):
        return np.asarray(tensor.values)
    return None


def given(node: gs.Node, index: int) -> gs.Tensor | None:
    """Returns operand number `index` of a node; None if it is left out."""
    return node.inputs[index] if index < len(node.inputs) and node.inputs[index].name else None


def float_attr(node: gs.Node, attribute: str, default: float) -> float:
    """Returns a float attribute of a node (or the default) rounded to float32, as kernels read
    it."""
    return float(np.float32(node.attrs.get(attribute, default)))


def numpy_dtype(tensor: gs.Tensor) -> np.dtype[Any]:
    """Returns the tensor's NumPy dtype; bfloat16 and the like are from ml_dtypes. The tensor must
    have a dtype."""
    dtype = tensor.dtype
    if isinstance(dtype, int):
        dtype = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    known: np.dtype[Any] = np.dtype(dtype)
    return known


def dtype_of(tensor: gs.Tensor) -> np.dtype[Any] | None:
    """Returns the tensor's NumPy (or ml_dtypes) dtype; None if it is unknown."""
    return None if tensor.dtype is None else numpy_dtype(tensor)


def is_float(tensor: gs.Tensor) -> bool:
    """True for floating-point tensors of 16 bits and more, in which sums can be computed; False for
    float8 and the like."""
    return str(dtype_of(tensor)) in ("float16", "bfloat16", "float32", "float64")


def shape_bytes(tensor: gs.Tensor, shape: Sequence[int]) -> int:
    """Returns the bytes of a tensor of this shape with the dtype of `tensor`."""
    return math.ceil(math.prod(shape) * element_bytes(tensor))


def element_bytes(tensor: gs.Tensor) -> float:
    """Returns the bytes of an element, less than 1 for packed types; 4 if the type is unknown."""
    return stored_bits(numpy_dtype(tensor)) / 8 if tensor.dtype is not None else 4.0
