"""Collectives on tensors, with gradients: allgather, broadcast and alltoall, as in `onnxpar.hvd`
for arrays.

As in Horovod, the gradients of `allgather` and `broadcast` are averages over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import onnxpar.hvd as arrays
from onnxpar.hvd.communicator import rank
from onnxpar.hvd.handles import Handle, synchronize
from onnxpar.hvd.process_sets import ProcessSet, global_process_set, members_of
from onnxpar.hvd.reductions import Average
from onnxpar.hvd.torch.handles import (
    arrays_of,
    converted,
    differentiable,
    each,
    in_new,
    in_place,
)
from onnxpar.hvd.torch.reductions import allreduce
from onnxpar.hvd.torch.tensors import array_of, tensor_of


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the tensors of all ranks, concatenated along the first dimension, whose size may
    differ between ranks. The gradient is this rank's rows of the averaged gradient."""

    def run(x: Any) -> Any:
        return in_new(x)(arrays.allgather(array_of(x), name, process_set))

    def back(grad: Any) -> Any:
        counts = arrays.allgather(np.array([len(tensor)]), f"{name}, rows", process_set)
        end = int(counts[: members_of(process_set, "allgather").rank + 1].sum())
        mean = allreduce(grad, name=name, op=Average, process_set=process_set)
        return mean[end - len(tensor) : end]

    return differentiable(run, back, tensor)


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Any]:
    """Starts an allgather, and returns a handle of its result, which has no gradient."""
    handle = arrays.allgather_async(array_of(tensor), name, process_set)
    return converted(handle, in_new(tensor))


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the allgather of each tensor, in the order of `tensors`."""
    return [
        allgather(tensor, f"{name or 'allgather'}.{index}", process_set)
        for index, tensor in enumerate(tensors)
    ]


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Any]]:
    """Starts the allgather of each tensor, and returns a handle of the list of results, which have
    no gradient."""
    handle = arrays.grouped_allgather_async(arrays_of(tensors), name, process_set)
    return converted(handle, each([in_new(tensor) for tensor in tensors]))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the tensor of rank `root_rank`; the other ranks pass a tensor with the same dtype and
    shape. The gradient on the root is the averaged gradient, and 0 on other ranks."""

    def run(x: Any) -> Any:
        return in_new(x)(arrays.broadcast(array_of(x), root_rank, name, process_set))

    def back(grad: Any) -> Any:
        mean = allreduce(grad, name=name, op=Average, process_set=process_set)
        return mean if rank() == root_rank else torch.zeros_like(mean)

    return differentiable(run, back, tensor)


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts a broadcast, and returns a handle of its result, which has no gradient."""
    handle = arrays.broadcast_async(array_of(tensor), root_rank, name, process_set)
    return converted(handle, in_new(tensor))


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrites `tensor` with the tensor of rank `root_rank`, and returns it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts to overwrite `tensor` with the tensor of rank `root_rank`, and returns a handle;
    `synchronize` writes the result."""
    handle = arrays.broadcast_async(array_of(tensor), root_rank, name, process_set)
    return converted(handle, in_place(tensor))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of `tensor` to all ranks, and returns the rows that this rank receives, in the
    order of ranks. Without `splits`, each rank gets an equal share. With `splits`, a list or a
    tensor of the number of rows for each rank, also returns the number of rows from each rank."""
    received: list[Any] = []

    def run(x: Any) -> Any:
        result, counts = synchronize(alltoall_async(x, splits, name, process_set))
        received.append(counts)
        return result

    def back(grad: Any) -> Any:
        return alltoall(grad, received[0], name, process_set)[0]

    result = differentiable(run, back, tensor)
    return result if splits is None else (result, received[0])


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[Any, Any]]:
    """Starts an alltoall, and returns a handle. Its result, which has no gradient, is a pair also
    without `splits`: the received rows, and the number of rows from each rank."""
    parts = splits.numpy() if isinstance(splits, torch.Tensor) else splits
    handle = arrays.alltoall_async(array_of(tensor), parts, name, process_set)

    def finish(found: tuple[Any, Any]) -> tuple[Any, Any]:
        return tensor_of(found[0], tensor.dtype), torch.from_numpy(found[1])

    return converted(handle, finish)
