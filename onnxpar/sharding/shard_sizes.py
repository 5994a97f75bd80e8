"""Sizes of a tensor's largest shard in every state of its reshard graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.layout.layout import Dim, largest_size
from onnxpar.layout.mesh import Axes, Axis, merge_axes
from onnxpar.layout.rows import rows_within
from onnxpar.sharding.factors import Parts, TensorFactors, with_axes
from onnxpar.sharding.numbering import distinct
from onnxpar.sharding.sub_axes import Locations, leaves_at, located

PartSizes = Callable[[int, Axes], Parts | None]
"""Sizes of the shards of a leaf that is split over axes; None if they are the default ones."""


@dataclass(frozen=True)
class StateSizes:
    """The largest shard in every state, at one of the sizes for which costs are computed.

    valid    states in which every leaf has enough elements for its axes
    bytes    the distinct numbers of bytes, in rising order
    which    for each state, the index into `bytes`
    extents  for each dimension, its number of elements in each state
    rows     for each dimension, its contiguous runs in each state, as in `rows_within`
    """

    weight: float
    valid: Array
    bytes: Array
    which: Array
    extents: list[Array]
    rows: list[Array]

    def rows_moved(self, changed: Array, start: Array, end: Array) -> Array:
        """The number of contiguous runs that steps copy between states, as in `rows_moved`; `start`
        and `end` are the states before and after each step, which cuts or joins the dimensions
        where its row of `changed` is True."""
        rows: Array = np.zeros(len(start))
        outer: Array = np.ones(len(start))
        for dim, (extents, runs) in enumerate(zip(self.extents, self.rows, strict=True)):
            here = outer * np.maximum(runs[start], runs[end])
            rows += np.where(changed[:, dim], here, 0.0)
            outer = outer * np.maximum(extents[start], extents[end])
        return rows


@dataclass(frozen=True)
class ShardSizes:
    """Computes sizes of shards. Each row of `states` has a location of each sub-axis, by number."""

    sub_axes: Sequence[Axis]
    locations: Locations
    states: Array
    factors: TensorFactors
    parts: PartSizes | None

    def of(self, dims: Sequence[Dim], itemsize: float, weight: float) -> StateSizes:
        """The sizes in all states if the tensor has these dimensions, of elements of `itemsize`
        bytes."""
        sizes = np.full(len(self.states), float(itemsize))
        every_extent, every_rows = [], []
        first = 0
        for number, dim in enumerate(dims):
            count = self.factors.dim_of_leaf.count(number)
            extents, rows = self._of_dim(dim, range(first, first + count))
            first += count
            every_extent.append(extents)
            every_rows.append(rows)
            sizes *= extents
        different, which = np.unique(sizes, return_inverse=True)
        return StateSizes(weight, ~np.isnan(sizes), different, which, every_extent, every_rows)

    def _of_dim(self, dim: Dim, leaves: Sequence[int]) -> tuple[Array, Array]:
        """Elements and contiguous runs of a dimension with these leaves; computed once for all
        states that agree on these leaves."""
        on_leaves = [self._on(i, set(leaves)) for i in range(len(self.sub_axes))]
        here = [np.array(places) >= 0 for places in on_leaves]
        codes = (np.where(h, np.cumsum(h), 0)[self.states[:, i]] for i, h in enumerate(here))
        examples, which = distinct(codes, [int(h.sum()) + 1 for h in here])
        own = (
            [places[at] for places, at in zip(on_leaves, state, strict=True)]
            for state in self.states[examples]
        )
        extents, rows = np.array([self._extent(dim, leaves, at) for at in own]).T
        return extents[which], rows[which]

    def _on(self, sub_axis: int, leaves: set[int]) -> list[int]:
        """The numbers of a sub-axis's locations; -1 for one that has none of these leaves."""
        locations = self.locations[sub_axis]
        return [i if leaves_at(location) & leaves else -1 for i, location in enumerate(locations)]

    def _extent(self, dim: Dim, leaves: Sequence[int], at: Sequence[int]) -> tuple[float, float]:
        """Elements of a dimension in the largest shard (NaN if a leaf has too few), and the
        contiguous runs within it; `at` has the index of each sub-axis's location."""
        given: list[tuple[Axes, Parts | None]] = []
        each = zip(self.sub_axes, self.locations, at, strict=True)
        here = [(sub_axis, locations[i]) for sub_axis, locations, i in each if i >= 0]
        for leaf in leaves:
            held = [located(*there) for there in here if leaf in leaves_at(there[1])]
            axes = merge_axes(tuple(held))
            given.append((axes, self.parts(leaf, axes) if self.parts and axes else None))
        return _extent_of(dim, tuple(given))


@lru_cache(maxsize=1 << 16)
def _extent_of(dim: Dim, given: tuple[tuple[Axes, Parts | None], ...]) -> tuple[float, float]:
    """Elements of a dimension in the largest shard if `given` axes split it, and its number of
    contiguous runs (`rows_within`)."""
    split = with_axes(dim, iter(given))
    return largest_size(split), rows_within(split)
