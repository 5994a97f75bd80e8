"""Reads layouts of plan.json: the positions that each rank holds of a port or a weight.

docs/reference/plan-json.md says what a layout means. This is a second reading of that page: nothing
is shared with the compiler that wrote the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import DamagedError
from onnxpar.equivalence.spans import Families, Family

MOST_POSITIONS = 2**31
"""The largest size of a dimension."""


class MeshReader:
    """The mesh of a plan: names and sizes of axes; ranks count through them in row-major order."""

    def __init__(self, mesh: Sequence[Sequence[Any]]) -> None:
        self.sizes = {str(name): int(size) for name, size in mesh}
        self.ranks = math.prod(self.sizes.values())

    def index(self, rank: int, axes: Sequence[Sequence[Any]]) -> tuple[int, int, bool]:
        """Of the shards over these axes: the index of a rank's shard, their number, and False if
        the rank holds nothing, because it is not at the coordinate that holds the dimension."""
        index, count, holds = 0, 1, True
        for name, size, *more in axes:
            before = more[0] if more else 1
            at = more[1] if len(more) > 1 else None
            whole = self.sizes[name]
            position = self._position(rank, name)
            if at is not None:
                holds = holds and position == at
                continue
            coordinate = position // (whole // (before * size)) % size
            index, count = index * size + coordinate, count * size
        return index, count, holds

    def _position(self, rank: int, axis: str) -> int:
        stride = self.ranks
        for name, size in self.sizes.items():
            stride //= size
            if name == axis:
                return rank // stride % size
        raise KeyError(axis)


def families_of(
    layout: Mapping[str, Any], mesh: MeshReader, families: Families, size: Callable[[object], int]
) -> list[Family]:
    """The family of each dimension of a layout; `size` gives the value of a size. Errors:
    DamagedError if the layout is none."""
    try:
        return [
            families.of([_positions(dim, mesh, rank, size)[0] for rank in range(mesh.ranks)])
            for dim in layout["dims"]
        ]
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise DamagedError(f"plan.json has a layout that is none: {layout!s:.80}") from error


def _positions(
    dim: Mapping[str, Any], mesh: MeshReader, rank: int, size: Callable[[object], int]
) -> tuple[Array, int]:
    """The positions that a rank holds, and the size of the dimension."""
    if "product" in dim:
        held, total = np.zeros(1, np.int64), 1
        for factor in dim["product"]:
            inner, count = _positions(factor, mesh, rank, size)
            held = (held[:, None] * count + inner).reshape(-1)
            total *= count
        return held, total
    if "concat" in dim:
        parts, total = [], 0
        for part in dim["concat"]:
            inner, count = _positions(part, mesh, rank, size)
            parts.append(inner + total)
            total += count
        return np.concatenate(parts), total
    return _factor(dim, mesh, rank, size(dim["size"]))


def _factor(dim: Mapping[str, Any], mesh: MeshReader, rank: int, size: int) -> tuple[Array, int]:
    """The positions that a rank holds of a factor with this size."""
    if not 0 <= size < MOST_POSITIONS:
        raise ValueError(f"a size is {size!r:.40}")
    index, count, holds = mesh.index(rank, dim.get("axes", ()))
    if not holds:
        return np.zeros(0, np.int64), size
    if "parts" in dim:
        parts = [int(n) for n in dim["parts"]]
        if len(parts) != count or sum(parts) != size or min(parts) < 0:
            raise ValueError(f"parts are {parts!r:.40}")
    elif "weights" in dim:
        parts = _proportional(size, [int(n) for n in dim["weights"]], count)
    else:
        parts = [size // count + (i < size % count) for i in range(count)]
    start = sum(parts[:index])
    return np.arange(start, start + parts[index]), size


def _proportional(size: int, weights: Sequence[int], count: int) -> list[int]:
    """The sizes of shards in proportion to these integers: each shard ends at the whole number
    nearest to its share of the size, of two the larger."""
    if len(weights) != count or min(weights) < 0 or not sum(weights):
        raise ValueError(f"weights are {weights!r:.40}")
    total = sum(weights)
    ends = [(2 * size * sum(weights[: i + 1]) + total) // (2 * total) for i in range(count)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
