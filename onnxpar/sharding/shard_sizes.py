"""Sizes of a tensor's largest shard in every state (factor sharding) of its reshard graph."""

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
"""A function from a leaf and its axes to the sizes of the leaf's shards; it returns None for
default sizes."""


@dataclass(frozen=True)
class StateSizes:
    """The largest shard in every state of a reshard graph, at one set of sizes at which costs are
    computed.

    weight   the weight of this set of sizes in costs
    bytes    the distinct sizes of the largest shard in bytes, in rising order
    which    for each state, the index into `bytes`
    extents  for each dimension, the shard's number of elements in each state
    rows     for each dimension, the shard's number of contiguous runs (`rows_within`) in each state
    """

    weight: float
    bytes: Array
    which: Array
    extents: list[Array]
    rows: list[Array]

    def rows_moved(self, changed: Array, start: Array, end: Array) -> Array:
        """Returns the number of contiguous runs that each step copies, as `rows_moved` of
        layout/rows.py.

        start, end  for each step, the states before and after it
        changed     [step, dimension]: True if the step cuts or joins the dimension
        """
        rows: Array = np.zeros(len(start))
        outer: Array = np.ones(len(start))
        for dim, (extents, runs) in enumerate(zip(self.extents, self.rows, strict=True)):
            here = outer * np.maximum(runs[start], runs[end])
            rows += np.where(changed[:, dim], here, 0.0)
            outer = outer * np.maximum(extents[start], extents[end])
        return rows


@dataclass(frozen=True)
class ShardSizes:
    """Computes the sizes of shards in all states of a reshard graph.

    locations  the possible locations of each sub-axis (a factor of a mesh axis)
    states     [state, sub-axis]: the index of the sub-axis's location
    parts      gives the sizes of a leaf's shards; None: default sizes
    """

    sub_axes: Sequence[Axis]
    locations: Locations
    states: Array
    factors: TensorFactors
    parts: PartSizes | None

    def of(self, dims: Sequence[Dim], itemsize: float, weight: float) -> StateSizes:
        """Returns the largest shard in all states, for a tensor with these dimensions and elements
        of `itemsize` bytes; `weight` is the weight of these dimensions in costs."""
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
        return StateSizes(weight, different, which, every_extent, every_rows)

    def _of_dim(self, dim: Dim, leaves: Sequence[int]) -> tuple[Array, Array]:
        """For each state, returns the elements and the contiguous runs of a dimension in the
        largest shard. States with equal sub-axes (factors of mesh axes) on the dimension's `leaves`
        are computed once."""
        on_leaves = [self._on(i, set(leaves)) for i in range(len(self.sub_axes))]
        here = [np.array(places) >= 0 for places in on_leaves]
        codes = (np.where(h, np.cumsum(h), 0)[self.states[:, i]] for i, h in enumerate(here))
        examples, which = distinct(codes, [int(h.sum()) + 1 for h in here])
        distinct_states = (
            [places[at] for places, at in zip(on_leaves, state, strict=True)]
            for state in self.states[examples]
        )
        extents, rows = np.array([self._extent(dim, leaves, at) for at in distinct_states]).T
        return extents[which], rows[which]

    def _on(self, sub_axis: int, leaves: set[int]) -> list[int]:
        """For each location of a sub-axis (a factor of a mesh axis), returns the location's index
        if it has one of these leaves (parts of dimensions), else -1."""
        locations = self.locations[sub_axis]
        return [i if leaves_at(location) & leaves else -1 for i, location in enumerate(locations)]

    def _extent(self, dim: Dim, leaves: Sequence[int], at: Sequence[int]) -> tuple[float, float]:
        """Returns the elements and contiguous runs of a dimension in the largest shard. `at` has
        the index of each sub-axis's location; negative if the sub-axis (a factor of a mesh axis) is
        not on this dimension."""
        splits: list[tuple[Axes, Parts | None]] = []
        columns = zip(self.sub_axes, self.locations, at, strict=True)
        here = [(sub_axis, locations[i]) for sub_axis, locations, i in columns if i >= 0]
        for leaf in leaves:
            held = [located(*there) for there in here if leaf in leaves_at(there[1])]
            axes = merge_axes(tuple(held))
            splits.append((axes, self.parts(leaf, axes) if self.parts and axes else None))
        return _extent_of(dim, tuple(splits))


@lru_cache(maxsize=1 << 16)
def _extent_of(dim: Dim, splits: tuple[tuple[Axes, Parts | None], ...]) -> tuple[float, float]:
    """Returns the elements and contiguous runs (`rows_within`) of a dimension in the largest shard;
    `splits` has the axes and part sizes of each leaf (a part of a dimension)."""
    split = with_axes(dim, iter(splits))
    return largest_size(split), rows_within(split)
