"""Reductions of NumPy arrays over ranks, of one array or of many (`grouped_`).

The calls return new arrays, or overwrite their arguments (names that end with `_`). They wait for
the result, or return a handle at once (`_async`).

All ranks of the process set must make the same calls in the same order. Each call raises InputError
if an argument is wrong on this rank, and RankError, on every rank, if names, dtypes, shapes or
options differ between ranks, or if a rank dies or does not make the call in time. After a
RankError, all further calls fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.communicator import current
from onnxpar.hvd.compression import Compression, Compressor, prepared
from onnxpar.hvd.fusion import FUSION_THRESHOLD, Fusion, layout_of
from onnxpar.hvd.handles import Handle, Together, Waiting, synchronize
from onnxpar.hvd.process_sets import ProcessSet, global_process_set, members_of
from onnxpar.hvd.reduce_work import Reduce
from onnxpar.hvd.reductions import ReduceOp, Reduction, op_of
from onnxpar.hvd.sparse import IndexedSlices, check_sparse, gather_sparse
from onnxpar.runtime.ranks import collectives

KIND = "ALLREDUCE"


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
    """Returns the elementwise reduction over the ranks, with the dtype and shape of `tensor`.

    op                Average by default, Sum, Min, Max, Product or Adasum; `average` is deprecated
    prescale_factor   multiplies the inputs, after compression
    postscale_factor  multiplies the result, before decompression
    process_set       the ranks that take part

    For `IndexedSlices`, the result has the rows of all ranks, divided by the number of ranks for
    Average.
    """
    what = called("allreduce", name)
    reduction = Reduction(op_of(op, average, what), prescale_factor, postscale_factor)
    work = _one(tensor, name, what, compression, reduction, process_set)
    return current().ordered(work, KIND, [name or ""])


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Starts an allreduce and returns a handle: `synchronize` waits for the result, `poll` is True
    if the result is ready.

    Do not change `tensor` until the result is ready. Collectives run in the order in which they
    were started.
    """
    what = called("allreduce_async", name)
    reduction = Reduction(op_of(op, average, what), prescale_factor, postscale_factor)
    work = _one(tensor, name, what, Compression.none, reduction, process_set)
    return Handle(current().begin(work, KIND, [name or ""]))


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Overwrites `tensor` with its reduction over the ranks, and returns it."""
    return synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def allreduce_async_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Starts to overwrite `tensor` with its reduction over the ranks, and returns a handle; the
    handle's result is `tensor`."""
    what = called("allreduce_", name)
    reduction = Reduction(op_of(op, average, what), prescale_factor, postscale_factor)
    work = _one(writable(tensor, what), name, what, Compression.none, reduction, process_set)
    work = _then(work, partial(overwritten, tensor))
    return Handle(current().begin(work, KIND, [name or ""]))


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    fusion_threshold: int = FUSION_THRESHOLD,
) -> list[Array]:
    """Returns the reduction of each array, as `allreduce` does, with the same bits. The arrays are
    sent together in buffers of up to `fusion_threshold` bytes, which is faster for many small
    arrays."""
    what = called("grouped_allreduce", name)
    reduction = Reduction(op_of(op, average, what), prescale_factor, postscale_factor)
    if current().cycles is not None:
        return _in_a_cycle(tensors, name, what, compression, reduction).result()
    work, names = _many(tensors, name, what, compression, reduction, process_set, fusion_threshold)
    return current().ordered(work, KIND, names)


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Array]]:
    """Starts a grouped_allreduce, and returns a handle of the list of results. Do not change the
    arrays until `synchronize` returns."""
    what = called("grouped_allreduce_async", name)
    reduction = Reduction(op_of(op, average, what), prescale_factor, postscale_factor)
    return Handle(_start(tensors, name, what, reduction, process_set))


def grouped_allreduce_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Overwrites each array with its reduction over the ranks, and returns the arrays."""
    return synchronize(
        grouped_allreduce_async_(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set
        )
    )


def grouped_allreduce_async_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Array]]:
    """Starts to overwrite each array with its reduction over the ranks, and returns a handle; the
    handle's result is the list of the same arrays."""
    what = called("grouped_allreduce_", name)
    reduction = Reduction(op_of(op, average, what), prescale_factor, postscale_factor)
    for index, tensor in enumerate(tensors):
        writable(tensor, f"{what}[{index}]")
    return Handle(_start(tensors, name, what, reduction, process_set, in_place=True))


def sparse_allreduce_async(
    tensor: IndexedSlices,
    name: str,
    op: ReduceOp,
    process_set: ProcessSet = global_process_set,
) -> Handle[IndexedSlices]:
    """Starts the reduction of a sparse tensor, and returns a handle. The result has the rows of all
    ranks, one after the other; rows with equal indices are not added."""
    what = called("sparse_allreduce_async", name)
    work = _one(tensor, name, what, Compression.none, Reduction(op), process_set)
    return Handle(current().begin(work, "ALLGATHER", [name]))


def called(function: str, name: str | None) -> str:
    """Returns a function and the name of its tensor, for errors: "allreduce 'loss'", or "allreduce"
    if the tensor has no name."""
    return function if name is None else f"{function} {name!r}"


def writable(tensor: Any, what: str) -> Array:
    """Returns `tensor`. Errors: InputError unless it is an array that can be overwritten."""
    if not isinstance(tensor, np.ndarray) or not tensor.flags.writeable:
        raise InputError(f"{what}: the tensor is not a writable array; make it one with np.array()")
    return tensor


def overwritten(tensor: Array, result: Array) -> Array:
    """Copies the values of `result` into `tensor`, and returns `tensor`."""
    np.copyto(tensor, result)
    return tensor


def _one(
    tensor: Any,
    name: str | None,
    what: str,
    compression: Compressor,
    reduction: Reduction,
    process_set: ProcessSet,
) -> Callable[[], Any]:
    """Returns a function that reduces one dense or sparse tensor when it is called. The arguments
    are checked at once."""
    members = members_of(process_set, what)
    if isinstance(tensor, IndexedSlices):
        slices = check_sparse(tensor, reduction, what)
        return lambda: gather_sparse(members, slices, reduction, name or "sparse")
    checked = collectives.as_exchangeable(tensor, what)
    reduction.check(checked.dtype, members.size, what)
    return Reduce.of(members, name or "", checked, compression, reduction, what)


def _then(work: Callable[[], Any], last: Callable[[Any], Any]) -> Callable[[], Any]:
    """Returns work that runs `work` and applies `last` to its result. A `Reduce` stays a `Reduce`,
    so that cycles can still fuse it with others."""
    if isinstance(work, Reduce):
        finish = work.finish
        return replace(work, finish=lambda received: last(finish(received)))
    return lambda: last(work())


def _dense(tensor: Any, what: str) -> Array:
    """Returns `tensor` as an array that can be sent. Errors: InputError if it is sparse."""
    if isinstance(tensor, IndexedSlices):
        raise InputError(f"{what}: give sparse tensors to allreduce, one at a time")
    return collectives.as_exchangeable(tensor, what)


def _start(
    tensors: Sequence[Any],
    name: str | None,
    what: str,
    reduction: Reduction,
    process_set: ProcessSet,
    in_place: bool = False,
) -> Waiting[list[Array]]:
    """Starts to reduce many tensors, and returns a handle of the results: new arrays, or the
    tensors themselves if `in_place`."""
    if current().cycles is not None:
        return _in_a_cycle(tensors, name, what, Compression.none, reduction, in_place)
    work, names = _many(tensors, name, what, Compression.none, reduction, process_set)
    if in_place:
        work = _then(work, partial(_overwritten_each, tensors))
    return current().begin(work, KIND, names)


def _overwritten_each(tensors: Sequence[Array], results: Sequence[Array]) -> list[Array]:
    return [overwritten(tensor, result) for tensor, result in zip(tensors, results, strict=True)]


def _in_a_cycle(
    tensors: Sequence[Any],
    name: str | None,
    what: str,
    compression: Compressor,
    reduction: Reduction,
    in_place: bool = False,
) -> Together[list[Array]]:
    """Starts to reduce many tensors by way of `Cycles`, which fuse them with other tensors that
    wait. Returns a handle of the results: new arrays, or the tensors themselves if `in_place`."""
    works = []
    for index, tensor in enumerate(tensors):
        dense = _dense(tensor, f"{what}[{index}]")
        each = f"{name or 'group'}.{index}"
        work = _one(dense, each, f"{what}[{index}]", compression, reduction, global_process_set)
        works.append(_then(work, partial(overwritten, tensor)) if in_place else work)
    cycles = current().cycles
    assert cycles is not None
    return Together(cycles.submit(works, KIND, name or ""), list)


def _many(
    tensors: Sequence[Any],
    name: str | None,
    what: str,
    compression: Compressor,
    reduction: Reduction,
    process_set: ProcessSet,
    threshold: int = FUSION_THRESHOLD,
) -> tuple[Callable[[], list[Array]], list[str]]:
    """Returns a function that reduces many tensors when it is called, and the names of the tensors
    ("group.0", "group.1", ...). The arguments are checked at once."""
    members = members_of(process_set, what)
    checked = []
    for index, tensor in enumerate(tensors):
        checked.append(_dense(tensor, f"{what}[{index}]"))
        reduction.check(checked[-1].dtype, members.size, f"{what}[{index}]")
    names = [f"{name or 'group'}.{index}" for index in range(len(checked))]

    def run() -> list[Array]:
        cast, wires, restore = prepared(compression, checked)
        fusion = Fusion(layout_of(names, wires), cast, threshold)
        return restore(fusion.reduce(members, wires, reduction, name or "group"))

    return run, names
