"""Converts the device lists of ONNX's shardings to digits of the rank, and back.

A mesh numbers its ranks in a mixed radix system, in which each axis is a digit: on dp=2,tp=4, rank
5 is dp 1, tp 1. A device list, row-major over the shards, can be expressed on a mesh if digits of
the rank make up the index of each shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from onnxpar.base.errors import StrategyError
from onnxpar.layout.mesh import Axes, Mesh


@dataclass(frozen=True)
class Digit:
    """A digit of the rank: it has `size` values, and its value times `stride` adds to the rank. On
    dp=2,tp=4, the axis dp is Digit(2, 4)."""

    size: int
    stride: int


def shard_digits(
    devices: Sequence[Sequence[int]], counts: Sequence[int], what: str
) -> list[list[Digit]]:
    """Returns for each component of a sharding the digits of the rank that number its shards, major
    first.

    devices  the ranks that hold each shard, row-major over all components' shards
    counts   the number of shards of each component
    what     names the tensor in errors

    Errors: StrategyError for a list that no order of mesh axes produces.
    """
    digits = _mixed_radix(tuple(tuple(sorted(group)) for group in devices), tuple(counts))
    if digits is None:
        raise StrategyError(
            f"{what}: no order of mesh axes gives devices {[list(g) for g in devices]} for shards "
            f"{list(counts)}; number the devices row-major over the mesh, such as 0, 1, 2, 3 "
            "or, with the axes exchanged, 0, 2, 1, 3"
        )
    return digits


@lru_cache(maxsize=1024)
def _mixed_radix(
    devices: tuple[tuple[int, ...], ...], counts: tuple[int, ...]
) -> list[list[Digit]] | None:
    """Like `shard_digits`; returns None for a list that no order of mesh axes produces."""
    at = np.array(devices).reshape(*counts, -1)
    by_component = [_digits(_along(at, i)) for i in range(at.ndim)]
    all_digits = sorted((d for digits in by_component for d in digits), key=lambda d: d.stride)
    rebuilt = sum(np.ix_(*(_values(digits) for digits in by_component)), np.zeros((), np.int64))
    filled = all(b.stride == a.stride * a.size for a, b in pairwise(all_digits))
    if not np.array_equal(rebuilt, at) or not filled or (all_digits and all_digits[0].stride != 1):
        return None
    return by_component[:-1]


def mesh_of_digits(devices: int, used: Iterable[tuple[str, Digit]]) -> Mesh:
    """Returns the coarsest mesh of this number of devices on which all digits in `used` are axes;
    `used` has (name of the user, digit). Errors: StrategyError, naming two users, if there is no
    such mesh."""
    bounds: dict[int, str] = {1: "", devices: ""}
    for what, digit in used:
        for bound in (digit.stride, digit.stride * digit.size):
            bounds.setdefault(bound, what)
    ordered = sorted(bounds)
    for small, large in pairwise(ordered):
        if large % small:
            raise StrategyError(
                f"{bounds[large] or bounds[small]} and {bounds[small] or bounds[large]}: no mesh "
                f"of {devices} devices has axes for both {devices // large} and "
                f"{devices // small} shards; annotate them for the same mesh"
            )
    sizes = [large // small for small, large in pairwise(ordered)][::-1]
    names = ["d"] if len(sizes) == 1 else [f"d{i}" for i in range(len(sizes))]
    return Mesh.of(list(zip(names, sizes, strict=True)) or [("d", 1)])


def axes_of(digits: Iterable[Digit], mesh: Mesh, what: str) -> Axes:
    """Converts digits of the rank to axes and sub-axes (factors of mesh axes) of a mesh. Errors:
    StrategyError, beginning with `what`, if a digit is neither."""
    try:
        return tuple(a for d in digits for a in mesh.flat(mesh.size // (d.stride * d.size), d.size))
    except StrategyError as error:
        raise StrategyError(f"{what}: {error}") from None


@lru_cache(maxsize=1024)
def devices_of(axes: Axes, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Returns for each shard of a tensor that is split over `axes` the ranks that hold it; shards
    are row-major over the axes."""
    groups: list[list[int]] = [[] for _ in range(math.prod(a.size for a in axes))]
    for rank in range(mesh.size):
        groups[mesh.coordinate(axes, rank)].append(rank)
    return tuple(map(tuple, groups))


def _along(at: np.ndarray[tuple[int, ...], np.dtype[np.int64]], dim: int) -> list[int]:
    """Returns the devices of the shards along dimension `dim` of the table `at`, as distances from
    the first device."""
    index = tuple(slice(None) if i == dim else 0 for i in range(at.ndim))
    return [int(v - at[index][0]) for v in at[index]]


def _digits(values: Sequence[int]) -> list[Digit]:
    """Returns the digits of the rank that count these values, major first: [0, 4, 1, 5] gives
    Digit(2, 1) and Digit(2, 4). The values start at 0. If no digits give them, returns one digit
    with stride 0."""
    out: list[Digit] = []
    while len(values) > 1:
        step = values[1]
        size = next((i for i, v in enumerate(values) if v != i * step), len(values))
        while len(values) % size:
            size -= 1
        if size == 1 or step < 1:
            return [Digit(len(values), 0)]  # no digits give this list; the caller notices
        out.insert(0, Digit(size, step))
        values = values[::size]
    return out


def _values(digits: Sequence[Digit]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Returns the numbers that these digits count, in order; the inverse of `_digits`."""
    out = np.zeros(1, np.int64)
    for digit in digits:
        out = (out[:, None] + np.arange(digit.size) * digit.stride).reshape(-1)
    return out
