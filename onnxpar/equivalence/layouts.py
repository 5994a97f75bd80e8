"""Reads layouts of plan.json: the positions that each rank holds of a port or a weight.

docs/reference/plan-json.md says what a layout means. This is a second reading of that page: nothing
is shared with the compiler that wrote the plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import DamagedError
from onnxpar.equivalence.spans import Families, Family

MOST_POSITIONS = 1 << 27
"""The largest size of a dimension."""
MOST_HELD = 1 << 28
"""The most positions of a dimension that all ranks hold together, equal ones counted once."""


class MeshReader:
    """The mesh of a plan: names and sizes of axes; ranks count through them in row-major order."""

    def __init__(self, mesh: Sequence[Sequence[Any]]) -> None:
        self.sizes = {str(name): int(size) for name, size in mesh}
        if len(self.sizes) != len(mesh) or min(self.sizes.values(), default=1) < 1:
            raise ValueError("a mesh has an axis twice, or one without ranks")
        self.ranks = math.prod(self.sizes.values())

    def coordinates(self, rank: int, axes: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
        """For each axis, a rank's coordinate and the number of coordinates. An axis at one
        coordinate has (0, 1) there, and (-1, 1) elsewhere: these ranks hold nothing."""
        found = []
        for name, size, *more in axes:
            before = more[0] if more else 1
            at = more[1] if len(more) > 1 else None
            position = self._position(rank, name)
            if at is not None:
                found.append((0 if position == at else -1, 1))
            else:
                whole = self.sizes[name]
                found.append((position // (whole // (before * size)) % size, size))
        return found

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
        return [_family(dim, mesh, families, size) for dim in layout["dims"]]
    except (
        KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, AttributeError,
        RecursionError, OverflowError,
    ) as error:  # fmt: skip
        raise DamagedError(f"plan.json has a layout that is none: {layout!s:.80}") from error


def _sized(dim: Mapping[str, Any], size: Callable[[object], int]) -> dict[str, Any]:
    """A dimension with its sizes as numbers."""
    for kind in ("product", "concat"):
        if kind in dim:
            return {kind: [_sized(part, size) for part in dim[kind]]}
    return {**dim, "size": size(dim["size"])}


def _family(
    dim: Mapping[str, Any], mesh: MeshReader, families: Families, size: Callable[[object], int]
) -> Family:
    """The family of a dimension."""
    if isinstance(dim.get("positions"), tuple):
        return families.of(dim["positions"])
    sized = _sized(dim, size)
    text = json.dumps(sized, sort_keys=True)
    if text not in families.by_layout:
        families.by_layout[text] = families.of(_spans(sized, mesh))
    return families.by_layout[text]


def _spans(dim: Mapping[str, Any], mesh: MeshReader) -> list[Array]:
    """What each rank holds; ranks at the same coordinates hold the same positions."""
    axes = list(_axes(dim))
    known: dict[tuple[tuple[int, int], ...], Array] = {}
    spans, total = [], 0
    for rank in range(mesh.ranks):
        key = tuple(mesh.coordinates(rank, axes))
        if key not in known:
            known[key] = _positions(dim, mesh, rank)[0]
            total += len(known[key])
            if total > MOST_HELD:
                raise ValueError("ranks hold too many positions")
        spans.append(known[key])
    return spans


def _axes(dim: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Yields the axes in all factors of a dimension."""
    yield from dim.get("axes", ())
    for part in (*dim.get("product", ()), *dim.get("concat", ())):
        yield from _axes(part)


def _positions(dim: Mapping[str, Any], mesh: MeshReader, rank: int) -> tuple[Array, int]:
    """The positions that a rank holds, and the size of the dimension."""
    if "product" in dim:
        held, total = np.zeros(1, np.int64), 1
        for factor in dim["product"]:
            inner, count = _positions(factor, mesh, rank)
            total = _within(total * count)
            held = (held[:, None] * count + inner).reshape(-1)
        return held, total
    if "concat" in dim:
        parts, total = [], 0
        for part in dim["concat"]:
            inner, count = _positions(part, mesh, rank)
            parts.append(inner + total)
            total = _within(total + count)
        return np.concatenate(parts), total
    return _factor(dim, mesh, rank, dim["size"])


def _within(size: int) -> int:
    """A size. Errors: ValueError if it is none."""
    if not 0 <= size < MOST_POSITIONS:
        raise ValueError(f"a size is {size!r:.40}")
    return size


def _factor(dim: Mapping[str, Any], mesh: MeshReader, rank: int, size: int) -> tuple[Array, int]:
    """The positions that a rank holds of a factor with this size."""
    _within(size)
    coordinates = mesh.coordinates(rank, dim.get("axes", ()))
    if any(coordinate < 0 for coordinate, _ in coordinates):
        return np.zeros(0, np.int64), size
    count = math.prod(n for _, n in coordinates)
    if count > mesh.ranks:
        raise ValueError(f"a dimension has {count!r:.40} parts")
    index = 0
    for coordinate, n in coordinates:
        index = index * n + coordinate
    if "parts" in dim:
        parts = [int(n) for n in dim["parts"]]
        if len(parts) != count or sum(parts) != size or min(parts) < 0:
            raise ValueError(f"parts are {parts!r:.40}")
    elif "weights" in dim:
        parts = _proportional(size, [int(n) for n in dim["weights"]], count)
    else:
        parts = [size]
        for _, n in coordinates:  # each axis cuts what the axes before it left
            parts = [part // n + (i < part % n) for part in parts for i in range(n)]
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
