"""Collectives on NumPy arrays. All ranks must make the same calls in the same order.

Results are new arrays. Each call raises InputError if an argument is wrong on this rank, and
RankError, on every rank, if names, dtypes or shapes differ between ranks, or if a rank dies or does
not make the call in time. After a RankError, all further calls fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, overload

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.errors import InputError
from onnxpar.hvd.communicator import current
from onnxpar.hvd.compression import Compression, Compressor
from onnxpar.hvd.fusion import FUSION_THRESHOLD, Fusion, layout_of
from onnxpar.hvd.reductions import Average, ReduceOp, check_reduction
from onnxpar.runtime import collectives
from onnxpar.runtime.groups import World


def allreduce(
    array: Any,
    op: ReduceOp = Average,
    name: str | None = None,
    compression: Compressor = Compression.none,
) -> Array:
    """Returns the elementwise reduction over the ranks, with the dtype and shape of `array`."""
    here, what = current(), _what("allreduce", name)
    checked = _reducible(array, op, what)
    return here.ordered(lambda: _allreduce(here.world, checked, op, name or "", compression))


def allreduce_async(
    array: Any,
    op: ReduceOp = Average,
    name: str | None = None,
    compression: Compressor = Compression.none,
) -> Future[Array]:
    """Starts an allreduce and returns a handle: `synchronize` waits for the result, `poll` is True
    if the result is ready.

    Do not change `array` until the result is ready. Allreduces run in the order in which they were
    started.
    """
    here, what = current(), _what("allreduce_async", name)
    checked = _reducible(array, op, what)
    return here.begin(lambda: _allreduce(here.world, checked, op, name or "", compression))


def synchronize(handle: Future[Array]) -> Array:
    """Waits for an `allreduce_async`, and returns its result."""
    return handle.result()


def poll(handle: Future[Array]) -> bool:
    """True if `synchronize` would return, or raise, immediately."""
    return handle.done()


def grouped_allreduce(
    arrays: Sequence[Any],
    op: ReduceOp = Average,
    name: str | None = None,
    compression: Compressor = Compression.none,
    fusion_threshold: int = FUSION_THRESHOLD,
) -> list[Array]:
    """Returns the reductions of many arrays, which are sent together in buffers of up to
    `fusion_threshold` bytes.

    Each result has the same bits as that of `allreduce`.
    """
    here, what = current(), _what("grouped_allreduce", name)
    checked = [_reducible(array, op, f"{what}[{i}]") for i, array in enumerate(arrays)]
    layout = layout_of([str(index) for index in range(len(checked))], checked)
    fusion = Fusion(layout, compression, fusion_threshold)
    return here.ordered(lambda: fusion.reduce(here, checked, op, name or "group"))


def allgather(array: Any, name: str | None = None) -> Array:
    """Returns the arrays of all ranks, concatenated along the first dimension, whose size may
    differ between ranks."""
    here, what = current(), _what("allgather", name)
    checked = _with_rows(array, what)
    return here.ordered(lambda: collectives.all_gather(here.world, checked, name or "")[0])


def broadcast(array: Any, root_rank: int, name: str | None = None) -> Array:
    """Returns the array of the rank `root_rank`; the other ranks must pass an array of the same
    dtype and shape."""
    here, what = current(), _what("broadcast", name)
    checked = collectives.as_exchangeable(array, what)
    check_root(root_rank, here.size, what)
    return here.ordered(lambda: collectives.broadcast(here.world, checked, root_rank, name or ""))


@overload
def alltoall(array: Any, splits: None = None, name: str | None = None) -> Array: ...
@overload
def alltoall(
    array: Any, splits: Sequence[int] | Array, name: str | None = None
) -> tuple[Array, Array]: ...
def alltoall(
    array: Any, splits: Sequence[int] | Array | None = None, name: str | None = None
) -> Array | tuple[Array, Array]:
    """Sends slices of `array` along its first dimension to all ranks, and returns the slices that
    this rank receives, concatenated in the order of ranks.

    Without `splits`, the slices are equal. With `splits`, rank i gets the next `splits[i]` rows,
    and a second result has the number of rows that came from each rank (int64).
    """
    here, what = current(), _what("alltoall", name)
    checked = _with_rows(array, what)
    rows = _splits(checked, splits, here.size, what)
    result, counts = here.ordered(
        lambda: collectives.all_to_all(here.world, checked, rows, name or "")
    )
    return result if splits is None else (result, np.array(counts, np.int64))


def reducescatter(array: Any, op: ReduceOp = Average, name: str | None = None) -> Array:
    """Reduces over the ranks, divides the result along its first dimension, and returns this rank's
    slice. If the rows cannot be divided equally, the first ranks get one row more."""
    here, what = current(), _what("reducescatter", name)
    checked = _with_rows(array, what)
    check_reduction(op, checked, what)
    return here.ordered(
        lambda: collectives.reduce_scatter(here.world, checked, op.value, name or "")
    )


def barrier(name: str | None = None) -> None:
    """Returns after all ranks have called it."""
    here = current()
    here.ordered(lambda: collectives.barrier(here.world, name or ""))


def check_root(root_rank: int, size: int, what: str) -> None:
    """Errors: InputError if the root is not a rank; `what` names the call."""
    if not 0 <= root_rank < size:
        raise InputError(f"{what}: root_rank={root_rank} must be from 0 to {size - 1}")


def _allreduce(
    world: World, array: Array, op: ReduceOp, name: str, compression: Compressor
) -> Array:
    wire, dtype = compression.compress(array)
    return compression.decompress(collectives.all_reduce(world, wire, op.value, name), dtype)


def _what(function: str, name: str | None) -> str:
    return function if name is None else f"{function} {name!r}"


def _reducible(array: Any, op: ReduceOp, what: str) -> Array:
    checked = collectives.as_exchangeable(array, what)
    check_reduction(op, checked, what)
    return checked


def _with_rows(array: Any, what: str) -> Array:
    checked = collectives.as_exchangeable(array, what)
    if checked.ndim == 0:
        raise InputError(f"{what}: the array is a scalar and has no rows; reshape it to [1]")
    return checked


def _splits(array: Array, splits: Sequence[int] | Array | None, size: int, what: str) -> list[int]:
    """Returns the number of rows to send to each rank. Errors: InputError."""
    rows = len(array)
    if splits is None:
        if rows % size:
            raise InputError(f"{what}: {rows} rows do not divide by {size} ranks; give splits")
        return [rows // size] * size
    found = [int(split) for split in splits]
    if len(found) != size or min(found) < 0 or sum(found) != rows:
        raise InputError(
            f"{what}: splits={found} must be {size} numbers of rows, one for each rank, which add "
            f"up to {rows}"
        )
    return found
