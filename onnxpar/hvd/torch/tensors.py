"""Tensors of PyTorch as arrays that ranks exchange, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.sparse import IndexedSlices

_BITS = {
    torch.bfloat16: (torch.int16, "bfloat16"),
    torch.float8_e4m3fn: (torch.uint8, "float8_e4m3fn"),
    torch.float8_e4m3fnuz: (torch.uint8, "float8_e4m3fnuz"),
    torch.float8_e5m2: (torch.uint8, "float8_e5m2"),
    torch.float8_e5m2fnuz: (torch.uint8, "float8_e5m2fnuz"),
}
"""Dtypes that NumPy does not know: a dtype with as many bits, and the name in ml_dtypes."""


def array_of(tensor: Any, what: str = "a tensor") -> Array:
    """Returns the values of a tensor as an array, sharing memory if possible. Complex numbers
    become pairs of numbers: [2, 3] becomes [2, 3, 2]. `what` names the tensor in errors. Errors:
    InputError for a tensor that is not dense and on the CPU."""
    if tensor.device.type != "cpu":
        raise InputError(f"{what} is on {tensor.device}; ranks exchange tensors on the CPU")
    if tensor.layout is not torch.strided:
        raise InputError(f"{what} is not dense: its layout is {tensor.layout}")
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.dtype in _BITS:
        import ml_dtypes

        bits, name = _BITS[plain.dtype]
        typed: Array = plain.view(bits).numpy().view(getattr(ml_dtypes, name))
        return typed
    array: Array = plain.numpy()
    return array


def tensor_of(array: Array, dtype: Any) -> Any:
    """Returns an array as a tensor of `dtype`: the inverse of `array_of`."""
    plain = np.ascontiguousarray(array).reshape(array.shape)
    if dtype in _BITS:
        return torch.from_numpy(plain.view(np.int8 if plain.itemsize == 1 else np.int16)).view(
            dtype
        )
    tensor = torch.from_numpy(plain)
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor


def store(tensor: Any, array: Array) -> None:
    """Overwrites the values of a tensor, whatever its strides, without a record in autograd."""
    tensor.data.copy_(tensor_of(array, tensor.dtype))


def slices_of(parameter: Any, grad: Any) -> IndexedSlices:
    """Returns the gradient of a parameter as `IndexedSlices`: the rows of a sparse gradient, all
    rows of a dense gradient, or no rows for None."""
    nothing = array_of(torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype))
    dense_shape = (len(parameter), *nothing.shape[1:])
    if grad is None:
        return IndexedSlices(nothing, np.empty(0, np.int64), dense_shape)
    if grad.layout is torch.sparse_coo and grad.sparse_dim() == 1:
        rows = grad.detach().coalesce()
        return IndexedSlices(array_of(rows.values()), rows.indices()[0].numpy(), dense_shape)
    return IndexedSlices(array_of(grad.to_dense()), np.arange(len(parameter)), dense_shape)


def sparse_of(rows: IndexedSlices, like: Any) -> Any:
    """Returns rows with distinct, ascending indices as a sparse COO tensor of the dtype and shape
    of `like`."""
    indices, values = torch.from_numpy(rows.indices)[None], tensor_of(rows.values, like.dtype)
    return torch.sparse_coo_tensor(
        indices, values, like.shape, is_coalesced=True, check_invariants=False
    )


def put_gradient(parameter: Any, result: Array | IndexedSlices) -> None:
    """Writes a reduced gradient to `parameter.grad`: into the tensor that is there if possible, or
    as a new tensor."""
    grad = parameter.grad
    if isinstance(result, IndexedSlices):
        if grad is None or grad.layout is torch.sparse_coo:
            parameter.grad = sparse_of(result, parameter)
            return
        result = result.dense()
    if grad is None or grad.layout is not torch.strided or 0 in grad.stride():
        grad = parameter.grad = torch.empty_like(parameter)  # an expanded one cannot be written
    grad.detach().copy_(tensor_of(result, grad.dtype))
