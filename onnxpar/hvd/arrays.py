"""Collectives on NumPy arrays: allgather, broadcast, alltoall, reducescatter, barrier and join.
Results are new arrays, but for `broadcast_`.

All ranks of the process set must make the same calls in the same order. Each call raises InputError
if an argument is wrong on this rank, and RankError, on every rank, if names, dtypes or shapes
differ between ranks, or if a rank dies or does not make the call in time. After a RankError, all
further calls fail. Names that end with `_async` start the collective and return a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.allreduce import called, overwritten, writable
from onnxpar.hvd.communicator import current
from onnxpar.hvd.compression import Compression, Compressor
from onnxpar.hvd.handles import Handle, synchronize
from onnxpar.hvd.process_sets import ProcessSet, global_process_set, members_of
from onnxpar.hvd.reductions import Adasum, Average, ReduceOp, Reduction
from onnxpar.runtime.ranks import collectives

Splits = Sequence[int] | Array | None


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Returns the arrays of all ranks, concatenated along the first dimension, whose size may
    differ between ranks: shapes [2, 5] and [3, 5] on two ranks give [5, 5] on both."""
    return current().ordered(_gather(tensor, name, process_set), "ALLGATHER", [name or ""])


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    """Starts an allgather, and returns a handle of its result."""
    return Handle(current().begin(_gather(tensor, name, process_set), "ALLGATHER", [name or ""]))


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Returns the allgather of each array, in the order of `tensors`."""
    return synchronize(grouped_allgather_async(tensors, name, process_set))


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Array]]:
    """Starts the allgather of each array, and returns a handle of the list of results."""
    names = _names(name, "allgather", len(tensors))
    works = [_gather(t, n, process_set) for t, n in zip(tensors, names, strict=True)]
    here = members_of(process_set, "grouped_allgather").communicator
    return Handle(here.begin(lambda: [work() for work in works], "ALLGATHER", names))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Returns the array of rank `root_rank` on every rank; the other ranks pass an array with the
    same dtype and shape. `root_rank` is a number among all ranks, also with a process set."""
    work = _from_root(tensor, root_rank, name, process_set)
    return current().ordered(work, "BROADCAST", [name or ""])


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Starts a broadcast, and returns a handle of its result."""
    work = _from_root(tensor, root_rank, name, process_set)
    return Handle(current().begin(work, "BROADCAST", [name or ""]))


def broadcast_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Overwrites `tensor` with the tensor of rank `root_rank`, and returns it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast_async_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Starts to overwrite `tensor` with the tensor of rank `root_rank`, and returns a handle; the
    handle's result is `tensor`."""
    work = _from_root(writable(tensor, "broadcast_"), root_rank, name, process_set)
    return Handle(current().begin(lambda: overwritten(tensor, work()), "BROADCAST", [name or ""]))


@overload
def alltoall(
    tensor: Any,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array: ...
@overload
def alltoall(
    tensor: Any,
    splits: Sequence[int] | Array,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Array, Array]: ...
def alltoall(
    tensor: Any,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """Sends slices of `tensor` along its first dimension to all ranks, and returns the slices that
    this rank receives, concatenated in the order of ranks.

    Without `splits`, the slices are equal. With `splits`, the rank in position i of the process set
    gets the next `splits[i]` rows: [1, 3] sends row 0 to the first rank, rows 1 to 3 to the second.
    A second result then has the number of rows that came from each rank, in the dtype of `splits`,
    or int32 if `splits` is a list.
    """
    work = _exchange(tensor, splits, name, process_set)
    result, counts = current().ordered(work, "ALLTOALL", [name or ""])
    return result if splits is None else (result, counts)


def alltoall_async(
    tensor: Any,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[Array, Array]]:
    """Starts an alltoall, and returns a handle. Its result is a pair also without `splits`: the
    received rows, and the number of rows that came from each rank."""
    work = _exchange(tensor, splits, name, process_set)
    return Handle(current().begin(work, "ALLTOALL", [name or ""]))


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Returns this rank's rows of the reduction over the ranks: each rank gets an equal share of
    the first dimension, in the order of ranks. If the rows do not divide evenly, the first ranks
    get one row more: 5 rows over 2 ranks are 3 and 2."""
    reduction = Reduction(op, prescale_factor, postscale_factor)
    work = _scatter(tensor, name, compression, reduction, process_set)
    return current().ordered(work, "REDUCESCATTER", [name or ""])


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Array]:
    """Starts a reducescatter, and returns a handle of its result."""
    reduction = Reduction(op, prescale_factor, postscale_factor)
    work = _scatter(tensor, name, Compression.none, reduction, process_set)
    return Handle(current().begin(work, "REDUCESCATTER", [name or ""]))


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """Returns the reducescatter of each array, in the order of `tensors`."""
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return synchronize(_scatters(tensors, name, compression, reduction, process_set))


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Array]]:
    """Starts the reducescatter of each array, and returns a handle of the list of results."""
    reduction = Reduction(op, prescale_factor, postscale_factor)
    return _scatters(tensors, name, Compression.none, reduction, process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the process set have called `barrier`."""
    members = members_of(process_set, "barrier")
    members.communicator.ordered(lambda: collectives.barrier(members.world), "BARRIER", ["barrier"])


def join(device: int = -1) -> int:
    """Lets this rank, which has no more data, contribute zeros to the allreduces of the others
    until all ranks have called `join`; returns the last rank that called it. `device` is not used.

    Averages still divide by the number of all ranks. Errors: InputError if ranks do not run
    collectives in cycles (HOROVOD_CYCLE_TIME). A rank that starts a collective other than an
    allreduce meanwhile gets InputError from that call.
    """
    here = current()
    if here.cycles is None:
        raise InputError("join needs cycles: set HOROVOD_CYCLE_TIME, or call init(cycle_time_ms=1)")
    return here.cycles.join()


def check_root(root_rank: int, ranks: Sequence[int], what: str) -> None:
    """Errors: InputError if `root_rank` is not one of `ranks`, the ranks of a process set. `what`
    names the call in the error."""
    if root_rank not in ranks:
        known = f"from 0 to {len(ranks) - 1}"
        if list(ranks) != list(range(len(ranks))):
            known = f"one of {list(ranks)}"
        raise InputError(f"{what}: root_rank={root_rank} must be {known}")


def _gather(tensor: Any, name: str | None, process_set: ProcessSet) -> Callable[[], Array]:
    """Returns a function that runs the allgather when it is called. The arguments are checked at
    once."""
    what = called("allgather", name)
    members, checked = members_of(process_set, what), _with_rows(tensor, what)
    return lambda: collectives.all_gather(members.world, checked, name or "")[0]


def _from_root(
    tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet
) -> Callable[[], Array]:
    """Returns a function that runs the broadcast when it is called. The arguments are checked at
    once."""
    what = called("broadcast", name)
    members = members_of(process_set, what)
    checked = collectives.as_exchangeable(tensor, what)
    check_root(root_rank, members.ranks, what)
    root = members.ranks.index(root_rank)
    return lambda: collectives.broadcast(members.world, checked, root, name or "")


def _exchange(
    tensor: Any, splits: Splits, name: str | None, process_set: ProcessSet
) -> Callable[[], tuple[Array, Array]]:
    """Returns a function that runs the alltoall when it is called; its result is the received rows,
    and the number of rows from each rank. The arguments are checked at once."""
    what = called("alltoall", name)
    members, checked = members_of(process_set, what), _with_rows(tensor, what)
    rows = _rows(checked, splits, members.size, what)
    dtype = splits.dtype if isinstance(splits, np.ndarray) else np.dtype(np.int32)

    def run() -> tuple[Array, Array]:
        result, counts = collectives.all_to_all(members.world, checked, rows, name or "")
        return result, np.array(counts, dtype)

    return run


def _scatter(
    tensor: Any,
    name: str | None,
    compression: Compressor,
    reduction: Reduction,
    process_set: ProcessSet,
) -> Callable[[], Array]:
    """Returns a function that runs the reducescatter when it is called. The arguments are checked
    at once."""
    what = called("reducescatter", name)
    members, checked = members_of(process_set, what), _with_rows(tensor, what)
    reduction.check(checked.dtype, members.size, what)
    if reduction.op is Adasum:
        raise InputError(f"{what}: Adasum is a reduction of allreduce alone")

    def run() -> Array:
        wire, context = compression.compress(checked)
        wire = collectives.as_exchangeable(wire, what)
        return compression.decompress(reduction.reduce_scatter(members, wire, name or ""), context)

    return run


def _scatters(
    tensors: Sequence[Any],
    name: str | None,
    compression: Compressor,
    reduction: Reduction,
    process_set: ProcessSet,
) -> Handle[list[Array]]:
    """Starts the reducescatter of each array, and returns a handle of the list of results."""
    names = _names(name, "reducescatter", len(tensors))
    works = [
        _scatter(tensor, each, compression, reduction, process_set)
        for tensor, each in zip(tensors, names, strict=True)
    ]
    here = members_of(process_set, "grouped_reducescatter").communicator
    return Handle(here.begin(lambda: [work() for work in works], "REDUCESCATTER", names))


def _names(name: str | None, kind: str, count: int) -> list[str]:
    return [f"{name or kind}.{index}" for index in range(count)]


def _with_rows(tensor: Any, what: str) -> Array:
    checked = collectives.as_exchangeable(tensor, what)
    if checked.ndim == 0:
        raise InputError(f"{what}: the array is a scalar and has no rows; reshape it to [1]")
    return checked


def _rows(array: Array, splits: Splits, size: int, what: str) -> list[int]:
    """Returns the number of rows of `array` to send to each of `size` ranks: `splits`, or equal
    shares. Errors: InputError if the rows do not divide evenly, or `splits` does not fit."""
    rows = len(array)
    if splits is None:
        if rows % size:
            raise InputError(f"{what}: {rows} rows do not divide by {size} ranks; give splits")
        return [rows // size] * size
    counts = [int(split) for split in splits]
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise InputError(
            f"{what}: splits={counts} must be {size} numbers of rows, one for each rank, which add "
            f"up to {rows}"
        )
    return counts
