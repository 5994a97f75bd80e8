"""Collectives on NumPy arrays among the ranks of a world, without an onnxruntime session.

All ranks must make the same calls in the same order, with the same `name`, `details` and dtype, and
with matching shapes. If the calls differ, or if a rank dies or is late, every rank raises RankError
in this call and every later one. Inputs are not changed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.runtime.ranks.groups import Group, World
from onnxpar.runtime.ranks.library import check, library

_TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
    "bfloat16": 16,
}
"""Dtypes that ranks can exchange, with their numbers in TensorProto.DataType."""


class _Array(ctypes.Structure):
    """The library's struct `onnxpar_array`: an array, and the collective that takes it."""

    _fields_ = (
        ("world", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("details", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
        ("dimensions", ctypes.c_int),
        ("type", ctypes.c_int),
    )


_Rows = ctypes.POINTER(ctypes.c_int64)
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, _Rows)


def as_exchangeable(x: Any, what: str) -> Array:
    """Returns `x` as an array that collectives take: in C order and this machine's byte order,
    copied only if necessary. `what` names `x` in the error.

    Errors: InputError if ranks cannot exchange its dtype.
    """
    array = np.asarray(x)
    if array.dtype.name not in _TYPES:
        raise InputError(
            f"{what}: dtype {array.dtype} cannot be exchanged; use one of {', '.join(_TYPES)}"
        )
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")


def all_reduce(
    world: World | Group,
    x: Array,
    op: str = "sum",
    name: str = "",
    details: str = "",
    out: Array | None = None,
) -> Array:
    """Returns the elementwise reduction of `x` over the ranks.

    op       sum, max, min, prod or, for floats, mean
    name     a name for errors, equal on all ranks
    details  a text that must be equal on all ranks
    out      where the result is written; None: a new array; may be `x`

    `x` and `out` must be results of `as_exchangeable`. Values are reduced in the order of ranks,
    and 16-bit floats in float32 with one rounding, so all ranks get the same bits.
    """
    result = np.empty_like(x) if out is None else out
    call = _call(world, x, name, details)
    check(_library().onnxpar_all_reduce(call, op.encode(), result.ctypes.data))
    return result


def reduce_scatter(
    world: World | Group, x: Array, op: str = "sum", name: str = "", details: str = ""
) -> Array:
    """Reduces `x` over the ranks, divides the result along dimension 0, and returns this rank's
    shard. Shards are as equal as possible, larger ones first: 5 rows over 2 ranks are 3 and 2."""
    each, more = divmod(len(x), world.size)
    rows = each + (world.rank < more)
    result = np.empty((rows, *x.shape[1:]), x.dtype)
    call = _call(world, x, name, details)
    check(_library().onnxpar_reduce_scatter(call, op.encode(), result.ctypes.data))
    return result


def all_gather(
    world: World | Group, x: Array, name: str = "", details: str = ""
) -> tuple[Array, list[int]]:
    """Returns (the arrays of all ranks joined along dimension 0, each rank's size of that
    dimension)."""
    call = _call(world, x, name, details)
    return _joined(world, x, lambda allocate: _library().onnxpar_all_gather(call, allocate))


def all_to_all(
    world: World | Group, x: Array, splits: Sequence[int], name: str = ""
) -> tuple[Array, list[int]]:
    """Sends consecutive slices of `x` along dimension 0 to the ranks, `splits[i]` rows to rank i.
    Returns (the slices that this rank received, joined in the order of ranks; the number of rows
    from each rank)."""
    call = _call(world, x, name)
    counts = (ctypes.c_int64 * world.size)(*splits)
    return _joined(world, x, lambda allocate: _library().onnxpar_all_to_all(call, counts, allocate))


def broadcast(
    world: World | Group, x: Array, root: int, name: str = "", out: Array | None = None
) -> Array:
    """Returns the `x` of rank `root`, in `out` if that is not None; `out` may be `x`."""
    result = np.empty_like(x) if out is None else out
    check(_library().onnxpar_broadcast(_call(world, x, name), root, result.ctypes.data))
    return result


def barrier(world: World | Group, name: str = "") -> None:
    """Returns after all ranks have called this function."""
    check(_library().onnxpar_barrier(world.id.encode(), name.encode()))


def gather_bytes(world: World | Group, payload: bytes, name: str = "") -> list[bytes]:
    """Returns the `payload` of each rank, by rank; payloads may differ in length."""
    rows, counts = all_gather(world, np.frombuffer(payload, np.uint8), name)
    ends = np.cumsum(counts)
    return [rows[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)]


def _joined(world: World | Group, x: Array, run: Callable[[Any], int]) -> tuple[Array, list[int]]:
    """Calls `run`, a collective that fills an array with rows of the shape and dtype of `x`'s rows.
    Returns (the array, the number of rows from each rank). When the library knows these numbers, it
    calls `allocate` for the memory."""
    results: list[tuple[Array, list[int]]] = []

    def allocate(rows: Any) -> int | None:
        counts = [int(rows[rank]) for rank in range(world.size)]
        try:
            # One byte more, because an empty array may have no address.
            memory = np.empty(sum(counts) * _row_bytes(x) + 1, np.uint8)
        except (MemoryError, ValueError):  # too large for memory, or for any array
            return None
        results.append((memory[:-1].view(x.dtype).reshape(sum(counts), *x.shape[1:]), counts))
        return memory.ctypes.data

    check(run(_Allocate(allocate)))
    return results[0]


def _row_bytes(x: Array) -> int:
    """The bytes of a row, along dimension 0."""
    return int(np.prod(x.shape[1:], dtype=np.int64)) * x.itemsize


def _call(world: World | Group, x: Array, name: str, details: str = "") -> Any:
    """Returns the library's description of `x` and of the collective. The caller must keep `x`
    alive during the call."""
    assert x.flags.c_contiguous and x.dtype.isnative, "see as_exchangeable"
    shape = (ctypes.c_int64 * x.ndim)(*x.shape)
    return ctypes.byref(
        _Array(
            world.id.encode(),
            name.encode(),
            details.encode(),
            shape,
            x.ctypes.data,
            x.ndim,
            _TYPES[x.dtype.name],
        )
    )


@functools.cache
def _library() -> ctypes.CDLL:
    """The plugin's library, with the signatures of the functions that this module calls."""
    loaded, call = library(), ctypes.POINTER(_Array)
    text, number, memory = ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p
    signatures: dict[str, list[Any]] = {
        "onnxpar_all_reduce": [call, text, memory],
        "onnxpar_reduce_scatter": [call, text, memory],
        "onnxpar_all_gather": [call, _Allocate],
        "onnxpar_all_to_all": [call, _Rows, _Allocate],
        "onnxpar_broadcast": [call, number, memory],
        "onnxpar_barrier": [text, text],
    }
    for name, arguments in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, number
    return loaded
