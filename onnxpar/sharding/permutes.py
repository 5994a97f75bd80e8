"""Finds layout changes that only move whole shards between ranks: collective permutes, in which
each rank sends one message.

Such a change keeps the grid of shards: the shards before and after are the same, and as many ranks
hold each shard. An example is a change from axes (x, y) to (y, x) on one dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from onnxpar.base.arrays import Array
from onnxpar.layout.layout import ReduceOp
from onnxpar.layout.mesh import Axes, Axis, Mesh, merge_axes, parts_over
from onnxpar.sharding.factors import TensorFactors, sizes_of
from onnxpar.sharding.numbering import distinct
from onnxpar.sharding.shard_sizes import PartSizes
from onnxpar.sharding.state import FactorSharding
from onnxpar.sharding.sub_axes import Location, Locations, leaves_at, located

MOST_PAIRS = 1 << 16
"""Most pairs of states with equal grids of shards that are examined. If there are more, only pairs
with a wanted state count."""

Held = Sequence[tuple[Axis, Location]]
"""The sub-axes at one leaf or in a reduction, in order, each with its location."""
Key = tuple[object, ...]


def permuted(
    before: FactorSharding,
    after: FactorSharding,
    factors: TensorFactors,
    parts: PartSizes | None,
    mesh: Mesh,
) -> bool:
    """True if the change of a tensor from the sharding `before` to `after` only moves whole shards
    between ranks. `factors` are the tensor's; `parts` gives the sizes of its shards."""

    def cut(sharding: FactorSharding) -> list[Key]:
        """The shard sizes of each leaf (a part of a dimension), and the reduction with its number
        of terms."""
        sizes = [_sizes(i, axes, factors, parts) for i, axes in enumerate(sharding.leaves)]
        return [*sizes, (parts_over(sharding.partial), sharding.reduce)]

    def held(sharding: FactorSharding) -> Array:
        """The shards of all ranks, each as the coordinates along the leaves (parts of dimensions),
        in sorted order."""
        ranks: Any = np.arange(mesh.size)
        splits = (*sharding.leaves, sharding.partial)
        at = [np.broadcast_to(mesh.coordinate(axes, ranks), ranks.shape) for axes in splits]
        return np.stack(at)[:, np.lexsort(at)]

    return cut(before) == cut(after) and np.array_equal(held(before), held(after))


def _sizes(leaf: int, axes: Axes, factors: TensorFactors, parts: PartSizes | None) -> Key:
    """Returns the sizes of the shards of a leaf (a part of a dimension) that is split over `axes`.
    If the leaf's size is open, returns the proportion of the shards and the sizes of the axes
    instead."""
    axes = merge_axes(axes)
    part_sizes = parts(leaf, axes) if parts is not None and axes else None
    if leaf in factors.open:
        return (part_sizes, *((axis.size, axis.at) for axis in axes))
    return sizes_of(part_sizes, factors.leaves[leaf].size, axes)


def _of_leaf(leaf: int, held: Held, factors: TensorFactors, parts: PartSizes | None) -> Key:
    """Returns the sizes of a leaf's shards, and for each run of sub-axes (factors of mesh axes)
    with the same location, this location and the number of parts. States with equal results split
    the leaf (a part of a dimension) into the same shards."""
    runs = groupby(held, lambda pair: pair[1])
    together = [(slot, parts_over(axis for axis, _ in run)) for slot, run in runs]
    sizes = _sizes(leaf, tuple(located(*pair) for pair in held), factors, parts)
    return (sizes, tuple(together))


def _of_partial(held: Held) -> Key:
    """Returns the number of terms of a partial tensor, and its reduction; () if it is not
    partial."""
    return (parts_over(axis for axis, _ in held), held[0][1]) if held else ()


@dataclass(frozen=True)
class Permutes:
    """Finds the collective permutes in a reshard graph.

    locations  the possible locations of each sub-axis (a factor of a mesh axis)
    states     [state, sub-axis]: the index of the sub-axis's location
    factors    the factors of the tensor
    parts      gives the sizes of the tensor's shards
    """

    sub_axes: Sequence[Axis]
    locations: Locations
    states: Array
    factors: TensorFactors
    parts: PartSizes | None

    def edges(self, valid: Array, wanted: Array) -> Iterator[tuple[Axes, Array, Array]]:
        """Yields the permutes between valid states as (moved sub-axes, states before, states
        after). If there are more than MOST_PAIRS, only permutes from or to a wanted state. `valid`
        is True for states that steps may visit, by state; `wanted` are indices of states."""
        return self.by_axes(*_pairs(self._grids, valid, wanted))

    def by_axes(self, start: Array, end: Array) -> Iterator[tuple[Axes, Array, Array]]:
        """Groups the steps from states `start` to states `end` by the sub-axes that they move: the
        location of such a sub-axis (a factor of a mesh axis) changes, or its position among the
        sub-axes at its location. Yields (sub-axes, states before, states after)."""
        moved: Array = np.zeros((len(start), len(self.sub_axes)), bool)
        for at in self._positions:
            moved |= at[start] != at[end]
        number = moved @ (1 << np.arange(len(self.sub_axes)))
        for bits in np.unique(number):
            axes = tuple(axis for i, axis in enumerate(self.sub_axes) if bits >> i & 1)
            yield axes, start[number == bits], end[number == bits]

    @cached_property
    def _grids(self) -> Array:
        """For each state, a number; states with equal numbers have equal grids of shards."""

        def of_leaf(leaf: int) -> Array:
            return self._numbers(
                lambda place: leaf in leaves_at(place),
                lambda held: _of_leaf(leaf, held, self.factors, self.parts),
            )

        columns = [of_leaf(leaf) for leaf in range(len(self.factors.leaves))]
        columns.append(self._numbers(lambda place: isinstance(place, str), _of_partial))
        grids = columns[0]
        for column in columns[1:]:
            both = grids, column
            _, grids = distinct(both, [int(c.max(initial=0)) + 1 for c in both])
        return grids

    def _numbers(self, at: Callable[[Location], bool], key: Callable[[Held], Key]) -> Array:
        """Returns a number for each state. States have equal numbers if `key` is equal for their
        sub-axes (factors of mesh axes) at the locations for which `at` is True."""
        here = [np.array([at(place) for place in places]) for places in self.locations]
        codes = (np.where(h, np.cumsum(h), 0)[self.states[:, i]] for i, h in enumerate(here))
        examples, which = distinct(codes, [int(h.sum()) + 1 for h in here])
        number_of: dict[Key, int] = {}
        numbers = []
        for state in self.states[examples]:
            columns = zip(self.sub_axes, self.locations, state, strict=True)
            held = [(axis, places[n]) for axis, places, n in columns if at(places[n])]
            numbers.append(number_of.setdefault(key(held), len(number_of)))
        return np.array(numbers)[which]

    @cached_property
    def _positions(self) -> list[Array]:
        """For each leaf (a part of a dimension) and each reduction, [state, sub-axis]: the number
        of parts into which the sub-axes before this sub-axis (a factor of a mesh axis) divide the
        leaf; 0 if the sub-axis is elsewhere."""
        sizes = np.array([axis.size for axis in self.sub_axes], int)
        in_order = np.arange(len(sizes))
        names = [(axis.name, axis.pre) for axis in self.sub_axes]
        by_mesh = np.array(sorted(range(len(names)), key=names.__getitem__), int)
        positions = []
        for key in {key for places in self.locations for place in places for key in _at(place)}:
            there = np.zeros(self.states.shape, bool)
            for i, places in enumerate(self.locations):
                there[:, i] = np.array([key in _at(p) for p in places])[self.states[:, i]]
            order = by_mesh if isinstance(key, str) else in_order  # as in FactorSharding
            counts = np.where(there, sizes, 1)[:, order].cumprod(1)
            before = np.ones_like(counts)
            before[:, order[1:]] = counts[:, :-1]
            positions.append(np.where(there, before, 0))
        return positions


def _at(location: Location) -> Iterable[int | ReduceOp]:
    """Returns the leaves (parts of dimensions) that a sub-axis (a factor of a mesh axis) at this
    location splits, or the reduction of a partial sum (each rank holds one term); nothing if the
    sub-axis is unused."""
    return leaves_at(location) if location is None or isinstance(location, tuple) else (location,)


def _pairs(grid: Array, valid: Array, wanted: Array) -> tuple[Array, Array]:
    """Returns all ordered pairs of different valid states with equal grids of shards, as two arrays
    of states. If there are more than MOST_PAIRS, only pairs with a wanted state. `grid` has the
    number of each state's grid."""
    states = np.flatnonzero(valid)
    ones = np.ones(len(states), np.int32)
    shape = (len(grid), int(grid.max()) + 1)
    members = csr_array((ones, (states, grid[states])), shape=shape)
    first = states
    if (np.bincount(grid[states]) ** 2).sum() > MOST_PAIRS:
        first = np.intersect1d(states, wanted)
    matches = (members[first] @ members.T).tocoo()
    start, end = first[matches.row], np.asarray(matches.col)
    if len(first) < len(states):
        both = np.concatenate((start, end)), np.concatenate((end, start))
        start, end = np.unique(np.stack(both), axis=1)
    return start[start != end], end[start != end]
