"""Reductions of tensors over the ranks, as in `onnxpar.hvd` for arrays, with gradients.

The gradient of `allreduce` is the gradient of the result, reduced over the ranks in the same way,
for Average and Sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import onnxpar.hvd as arrays
from onnxpar.base.errors import InputError
from onnxpar.hvd.allreduce import called
from onnxpar.hvd.compression import Compression, Compressor
from onnxpar.hvd.handles import Handle, synchronize
from onnxpar.hvd.process_sets import ProcessSet, global_process_set
from onnxpar.hvd.reductions import Adasum, Average, ReduceOp, Sum, op_of
from onnxpar.hvd.sparse import IndexedSlices
from onnxpar.hvd.torch.handles import (
    arrays_of,
    converted,
    differentiable,
    each,
    in_new,
    in_place,
)
from onnxpar.hvd.torch.tensors import array_of, slices_of, sparse_of


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the elementwise reduction of a tensor over the ranks, as a new tensor with a
    gradient. The arguments are those of `onnxpar.hvd.allreduce`."""
    op = _op(op, average, "allreduce", name, [tensor])
    factors = prescale_factor, postscale_factor, process_set

    def run(x: Any) -> Any:
        total = arrays.allreduce(array_of(x), None, name, compression, op, *factors)
        return in_new(x)(total)

    def back(grad: Any) -> Any:
        _linear(op, "allreduce", name)
        return allreduce(grad, None, name, compression, op, *factors)

    return differentiable(run, back, tensor)


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts an allreduce, and returns a handle of its result, which has no gradient. Do not change
    `tensor` until the result is ready."""
    op = _op(op, average, "allreduce_async", name, [tensor])
    factors = prescale_factor, postscale_factor, process_set
    handle = arrays.allreduce_async(array_of(tensor), None, name, op, *factors)
    return converted(handle, in_new(tensor))


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrites `tensor` with its reduction over the ranks, and returns it."""
    factors = prescale_factor, postscale_factor, process_set
    return synchronize(allreduce_async_(tensor, average, name, op, *factors))


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts to overwrite `tensor` with its reduction over the ranks, and returns a handle;
    `synchronize` writes the result."""
    op = _op(op, average, "allreduce_async_", name, [tensor])
    factors = prescale_factor, postscale_factor, process_set
    handle = arrays.allreduce_async(array_of(tensor), None, name, op, *factors)
    return converted(handle, in_place(tensor))


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns the reduction of each tensor, in the order of `tensors`, with gradients; they are
    sent together, which is faster for many small tensors."""
    op = _op(op, average, "grouped_allreduce", name, tensors)
    factors = prescale_factor, postscale_factor, process_set

    def run(*xs: Any) -> Any:
        total = arrays.grouped_allreduce(arrays_of(xs), None, name, compression, op, *factors)
        return tuple(each([in_new(x) for x in xs])(total))

    def back(*grads: Any) -> Any:
        _linear(op, "grouped_allreduce", name)
        return grouped_allreduce(grads, None, name, compression, op, *factors)

    return list(differentiable(run, back, *tensors))


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Any]]:
    """Starts a grouped_allreduce, and returns a handle of the list of results, which have no
    gradient."""
    op = _op(op, average, "grouped_allreduce_async", name, tensors)
    factors = prescale_factor, postscale_factor, process_set
    handle = arrays.grouped_allreduce_async(arrays_of(tensors), None, name, op, *factors)
    return converted(handle, each([in_new(tensor) for tensor in tensors]))


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrites each tensor with its reduction over the ranks, and returns the tensors."""
    factors = prescale_factor, postscale_factor, process_set
    return synchronize(grouped_allreduce_async_(tensors, average, name, op, *factors))


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Any]]:
    """Starts to overwrite each tensor with its reduction over the ranks, and returns a handle;
    `synchronize` writes the results."""
    op = _op(op, average, "grouped_allreduce_async_", name, tensors)
    factors = prescale_factor, postscale_factor, process_set
    handle = arrays.grouped_allreduce_async(arrays_of(tensors), None, name, op, *factors)
    return converted(handle, each([in_place(tensor) for tensor in tensors]))


def sparse_allreduce_async(
    tensor: Any, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Handle[Any]:
    """Starts the reduction of a sparse tensor in COO layout with one sparse dimension, and returns
    a handle. The result is a sparse tensor of the same shape, with each index once."""
    handle = arrays.sparse_allreduce_async(slices_of(tensor, tensor), name, op, process_set)

    def finish(result: IndexedSlices) -> Any:
        return sparse_of(result.merged(), tensor)

    return converted(handle, finish)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Returns this rank's rows of the reduction over the ranks, with a gradient. The first ranks
    get one row more if the rows do not divide evenly."""
    _op(op, None, "reducescatter", name, [tensor])
    factors = prescale_factor, postscale_factor

    def run(x: Any) -> Any:
        total = arrays.reducescatter(array_of(x), name, compression, op, process_set, *factors)
        return in_new(x)(total)

    def back(grad: Any) -> Any:
        _linear(op, "reducescatter", name)
        every = arrays.allgather(array_of(grad), name, process_set)
        count = len(process_set.ranks) if op is Average else 1
        return in_new(grad)(every) * (prescale_factor * postscale_factor / count)

    return differentiable(run, back, tensor)


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Any]:
    """Starts a reducescatter, and returns a handle of its result, which has no gradient."""
    _op(op, None, "reducescatter_async", name, [tensor])
    factors = prescale_factor, postscale_factor
    handle = arrays.reducescatter_async(array_of(tensor), name, op, process_set, *factors)
    return converted(handle, in_new(tensor))


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Returns the reducescatter of each tensor, in the order of `tensors`."""
    return [
        reducescatter(
            tensor,
            f"{name or 'reducescatter'}.{index}",
            compression,
            op,
            process_set,
            prescale_factor,
            postscale_factor,
        )
        for index, tensor in enumerate(tensors)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Any]]:
    """Starts the reducescatter of each tensor, and returns a handle of the list of results, which
    have no gradient."""
    _op(op, None, "grouped_reducescatter_async", name, tensors)
    factors = prescale_factor, postscale_factor
    inputs = arrays_of(tensors)
    handle = arrays.grouped_reducescatter_async(inputs, name, op, process_set, *factors)
    return converted(handle, each([in_new(tensor) for tensor in tensors]))


def _op(
    op: ReduceOp | None, average: bool | None, function: str, name: str | None, tensors: Any
) -> ReduceOp:
    """Returns the reduction that `op` or the deprecated `average` requests. Errors: InputError for
    complex tensors with a reduction other than Average, Sum and Adasum."""
    what = called(function, name)
    chosen = op_of(op, average, what)
    if chosen not in (Average, Sum, Adasum) and any(torch.is_complex(each) for each in tensors):
        raise InputError(f"{what}: complex tensors can only be reduced by hvd.Sum and hvd.Average")
    return chosen


def _linear(op: ReduceOp, function: str, name: str | None) -> None:
    """Errors: InputError if the gradient of the reduction `op` is not known."""
    if op not in (Average, Sum):
        raise InputError(
            f"{called(function, name)}: the gradient is known for Average and Sum only"
        )
