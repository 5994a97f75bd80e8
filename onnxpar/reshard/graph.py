"""The placements of a tensor, and the ways between them: single collectives and local cuts, of
which the cheapest sequence is a shortest path.

A placement is where each piece of a mesh axis is: nowhere, on a slot of leaves, or pending. Pieces
on a leaf are in mesh order, so that only the last can leave, and only a later one can come.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from onnxpar.base.arrays import Array
from onnxpar.cost.cost import Costs
from onnxpar.layout.layout import Dim, Factor, Product, ReduceOp, estimated_size
from onnxpar.layout.mesh import Axes, Axis, Mesh, merge_axes
from onnxpar.layout.rows import rows_within
from onnxpar.sharding.factors import TensorFactors, with_axes
from onnxpar.sharding.state import FactorSharding, covered_axes

Slot = tuple[int, ...]
"""Leaves of one dimension that hold an axis together: one, or one of each segment."""
Location = Slot | ReduceOp | None
"""Where a piece of an axis is: on leaves, pending in a reduction, or nowhere."""
Move = tuple[str, Axes, Location, Location]
"""A collective or a cut: its kind, the pieces that it moves, from where to where."""

LOCAL_STEPS = ("LocalSlice", "Select")
"""Steps that move nothing between ranks."""
STEP = 1e-16
"""Seconds that are added to each step, so that of ways that cost the same the shorter is taken."""

MOST_DETOURS = 1 << 12
"""States of a tensor's graph; above as many, an axis goes only where a wanted sharding has it."""

PartSizes = Callable[[int, Axes], tuple[int, ...]]
"""Sizes of the parts of a leaf that is split over axes."""


@dataclass(frozen=True)
class ReshardStep:
    """One collective, or a local cut: `kind` over `axes`, between two placements.

    LocalSlice keeps this rank's part; Select keeps the value on coordinate 0 of `axes` and the
    neutral element of the reduction elsewhere (from whole to partial). `rows` are those that it
    moves, as `rows_moved` has them.
    """

    kind: str
    axes: Axes
    before: FactorSharding
    after: FactorSharding
    rows: int = 0


@dataclass(frozen=True)
class _Sizes:
    """What the fullest rank holds under each placement, at one of the sizes that costs are computed
    at: `kinds` are the bytes that there are, `numbers` which of them; `valid`, whether leaves have
    elements enough. `extents` and `rows` are by dimension."""

    weight: float
    valid: Array
    kinds: Array
    numbers: Array
    extents: list[Array]
    rows: list[Array]


class ReshardGraph:
    """All placements of a tensor in which each piece is where some of the `wanted` ones have it.

    `itemsize` is in bytes, of an element. Errors: Unordered where pieces stand on leaves in orders
    that contradict each other, or do not fit together.
    """

    def __init__(
        self,
        wanted: Sequence[FactorSharding],
        factors: TensorFactors,
        costs: Costs,
        itemsize: float,
        parts: PartSizes | None = None,
    ) -> None:
        self.wanted = {
            factor_sharding: i for i, factor_sharding in enumerate(dict.fromkeys(wanted))
        }
        self.factors = factors
        self.costs = costs
        self.parts = parts
        idle = [(costs.mesh.axis(name),) for name, size in costs.mesh.shape if size > 1]
        cuts = _cuts([*(a for p in wanted for a in (*p.leaves, p.partial)), *idle])
        found = [_places(p, cuts, factors) for p in self.wanted]
        others = [dict.fromkeys(_refined(axes, cuts)) for axes in idle]
        chains = [_refined(axes, cuts) for p in wanted for axes in p.leaves]
        self.pieces = _ordered(chains, [*found, *others])
        self.locations = self._locations(found, detours=True)
        if math.prod(map(len, self.locations)) > MOST_DETOURS:
            self.locations = self._locations(found, detours=False)
        counts = [len(locations) for locations in self.locations]
        self.strides = [math.prod(counts[i + 1 :]) for i in range(len(counts))]
        self.states: Array = np.indices(counts).reshape(len(counts), math.prod(counts)).T
        self.sizes = [self._sizes(dims, itemsize, weight) for weight, dims in factors.costed]
        self.valid = self.sizes[0].valid & self._is_one_reduction()
        self.at = [
            sum(
                s * locations.index(places.get(piece))
                for s, locations, piece in zip(
                    self.strides, self.locations, self.pieces, strict=True
                )
            )
            for places in found
        ]

    def _locations(
        self, found: Sequence[Mapping[Axis, Location]], detours: bool
    ) -> list[list[Location]]:
        """Where each piece may be: as in what is wanted, or on a leaf in between."""
        leaves = set(range(len(self.factors.leaves) if detours else 0)) - self.factors.open
        locations: list[list[Location]] = []
        for piece in self.pieces:
            wanted = [places.get(piece) for places in found]
            between = [(i,) for i in sorted(leaves) if self.factors.leaves[i].size >= piece.size]
            locations.append(list(dict.fromkeys([None, *wanted, *between])))
        return locations

    def seconds(self) -> Array:
        """Seconds from each wanted placement (rows) to each (columns), by the cheapest way."""
        found: Array = dijkstra(self.graph, indices=self.at)[:, self.at]
        return found

    def seconds_apart(self) -> Array:
        """The same as two matrices: seconds of local cuts, and of collectives."""
        local: Array = np.zeros((len(self.at), len(self.at)))
        seconds, before = dijkstra(self.graph, indices=self.at, return_predecessors=True)
        now = np.broadcast_to(np.array(self.at), local.shape).copy()
        while True:
            last = np.take_along_axis(before, now, 1)
            rows, columns = np.nonzero(last >= 0)
            if not len(rows):
                return np.stack((local, seconds[:, self.at] - local))
            steps = last[rows, columns], now[rows, columns]
            local[rows, columns] += self.local_steps[steps]
            now[rows, columns] = steps[0]

    def steps(self, start: FactorSharding, goal: FactorSharding) -> list[ReshardStep]:
        """The cheapest way from one wanted placement to another."""
        first, last = self.at[self.wanted[start]], self.at[self.wanted[goal]]
        _, before = dijkstra(self.graph, indices=first, return_predecessors=True)
        steps: list[ReshardStep] = []
        while last != first:
            if before[last] < 0:
                raise Unordered
            steps.append(self._step(int(before[last]), last))
            last = int(before[last])
        return steps[::-1]

    @cached_property
    def graph(self) -> Any:
        """Seconds of each single step, as a sparse matrix over all placements."""
        return self._matrix(self.moves())

    @cached_property
    def local_steps(self) -> Any:
        """The same, of local cuts alone."""
        return self._matrix(move for move in self.moves() if move[0] in LOCAL_STEPS)

    def _matrix(self, moves: Iterable[Move]) -> Any:
        count = len(self.states)
        rows, columns, values = [np.zeros(0, int)], [np.zeros(0, int)], [np.zeros(0)]
        for kind, axes, source, target in moves:
            start, end = self._edges(axes, source, target)
            seconds = np.full(len(start), STEP)
            for at in self.sizes:
                larger = np.maximum(at.numbers[start], at.numbers[end])
                steps = np.zeros(len(at.kinds))
                for i in np.flatnonzero(np.bincount(larger)):
                    steps[i] = self.costs.step(kind, axes, at.kinds[i])
                moved = self._rows(at, source, target, start, end)
                seconds += at.weight * (steps[larger] + self.costs.rows(1) * moved)
            rows.append(start)
            columns.append(end)
            values.append(seconds)
        # csgraph takes 32-bit indices only, in SciPy before 1.15
        ends = tuple(np.concatenate(each).astype(np.int32) for each in (rows, columns))
        return csr_array((np.concatenate(values), ends), shape=(count, count))

    def _step(self, start: int, end: int) -> ReshardStep:
        """The single step between two placements."""
        before, after = self.states[start], self.states[end]
        run = [i for i in range(len(self.pieces)) if before[i] != after[i]]
        axes = tuple(self.pieces[i] for i in run)
        source, target = (self.locations[run[0]][at[run[0]]] for at in (before, after))
        kind = self._kind(axes, source, target)
        assert kind is not None
        ends = np.array([start]), np.array([end])
        rows = sum(at.weight * self._rows(at, source, target, *ends)[0] for at in self.sizes)
        factor_shardings = self._factor_sharding(before), self._factor_sharding(after)
        return ReshardStep(kind, merge_axes(axes), *factor_shardings, round(rows))

    def _factor_sharding(self, state: Array) -> FactorSharding:
        leaves: list[Axes] = [()] * len(self.factors.leaves)
        partial: Axes = ()
        reduce: ReduceOp = "sum"
        for piece, locations, at in zip(self.pieces, self.locations, state, strict=True):
            where = locations[at]
            if isinstance(where, tuple):
                for leaf in where:
                    leaves[leaf] = (*leaves[leaf], piece)
            elif where is not None:
                partial, reduce = (*partial, piece), where
        return FactorSharding(tuple(leaves), partial, reduce)

    def moves(self) -> Iterator[Move]:
        """The single steps that there are."""
        for n in range(1, len(self.pieces) + 1):
            for run in combinations(range(len(self.pieces)), n):
                common = [
                    w for w in self.locations[run[0]] if all(w in self.locations[i] for i in run)
                ]
                axes = tuple(self.pieces[i] for i in run)
                for source in common:
                    for target in common:
                        kind = self._kind(axes, source, target)
                        if kind:
                            yield kind, axes, source, target

    def _kind(self, axes: Axes, source: Location, target: Location) -> str | None:
        """The collective that moves axes from here to there in one step, if one does."""
        if source == target or not (self._is_told(source) and self._is_told(target)):
            return None
        if source is None:
            return "Select" if isinstance(target, str) else "LocalSlice"
        if isinstance(source, str):
            if target is None:
                return "AllReduce"
            scatters = isinstance(target, tuple) and self._may_scatter(target, axes)
            return "ReduceScatter" if scatters else None
        if target is None:
            return "AllGather"
        if isinstance(target, str):
            return None
        dims = self.factors.dim_of_leaf
        if dims[source[0]] != dims[target[0]]:
            covers = self._covers(source, axes) and self._may_scatter(target, axes)
            return "AllToAll" if covers else None
        if set(source) > set(target):
            return "AllGather"
        return "LocalSlice" if set(source) < set(target) else None

    def _edges(self, axes: Axes, source: Location, target: Location) -> tuple[Array, Array]:
        """The placements that a step leads from, and to: on the leaves that the pieces leave or
        reach, nothing stands behind them."""
        run = [self.pieces.index(a) for a in axes]
        mask = self.valid.copy()
        shift = 0
        for i in run:
            before, after = self.locations[i].index(source), self.locations[i].index(target)
            mask &= self.states[:, i] == before
            shift += self.strides[i] * (after - before)
        touched = _leaves(source) ^ _leaves(target)
        for i in range(min(run) + 1, len(self.pieces)):
            for at, where in enumerate(self.locations[i] if i not in run else ()):
                if touched & _leaves(where):
                    mask &= self.states[:, i] != at
        start = np.flatnonzero(mask)
        legal = self.valid[start + shift]
        return start[legal], start[legal] + shift

    def _rows(
        self, at: _Sizes, source: Location, target: Location, start: Array, end: Array
    ) -> Array:
        """The rows that a step moves, as `rows_moved` has them."""
        changed = {self.factors.dim_of_leaf[leaf] for leaf in _leaves(source) ^ _leaves(target)}
        rows: Array = np.zeros(len(start))
        outer: Array = np.ones(len(start))
        for dim in range(max(changed, default=-1) + 1):
            if dim in changed:
                rows += outer * np.maximum(at.rows[dim][start], at.rows[dim][end])
            outer = outer * np.maximum(at.extents[dim][start], at.extents[dim][end])
        return rows

    def _is_told(self, where: Location) -> bool:
        """Whether each part of a dimension is one run, if only a run can tell its size: of others
        nothing says where they start."""
        if self.factors.open.isdisjoint(_leaves(where)):
            return True
        assert isinstance(where, tuple)
        dim = self.factors.dims[self.factors.dim_of_leaf[where[0]]]
        children = dim.children if isinstance(dim, Product) else (dim,)
        major = next(c for c in children if not isinstance(c, Factor) or c.is_leaf)
        first = self.factors.dim_of_leaf.index(self.factors.dim_of_leaf[where[0]])
        return where == (first,) and isinstance(major, Factor)

    def _may_scatter(self, slot: Slot, axes: Axes) -> bool:
        """Whether a collective deals out parts of a slot: all elements, and where only a run can
        tell the size, parts as equal as can be."""
        dim = self.factors.dims[self.factors.dim_of_leaf[slot[0]]]
        is_even = isinstance(dim, Factor) and len(axes) == 1
        return self._covers(slot, axes) and (is_even or self.factors.open.isdisjoint(slot))

    def _covers(self, slot: Slot, axes: Axes) -> bool:
        """Whether axes on a slot split every element of its dimension."""
        given = iter([(axes if i in slot else (), None) for i in range(len(self.factors.leaves))])
        dims = [with_axes(dim, given) for dim in self.factors.dims]
        return covered_axes(dims[self.factors.dim_of_leaf[slot[0]]]) is not None

    def _sizes(self, dims: Sequence[Dim], itemsize: float, weight: float) -> _Sizes:
        """What the fullest rank holds under each placement, where the dimensions are these."""
        sizes = np.full(len(self.states), float(itemsize))
        every_extent, every_rows = [], []
        first = 0
        for number, dim in enumerate(dims):
            count = self.factors.dim_of_leaf.count(number)
            leaves = range(first, first + count)
            first += count
            kept = [self._kept(i, set(leaves)) for i in range(len(self.pieces))]
            numbers = np.zeros(len(self.states), int)
            for i, places in enumerate(kept):
                numbers = numbers * (len(places) + 1) + np.array(places)[self.states[:, i]] + 1
            _, examples, which = np.unique(numbers, return_index=True, return_inverse=True)
            keys = (
                [places[at] for places, at in zip(kept, state, strict=True)]
                for state in self.states[examples]
            )
            extents, rows = np.array([self._extent(dim, leaves, key) for key in keys]).T
            every_extent.append(extents[which.reshape(-1)])
            every_rows.append(rows[which.reshape(-1)])
            sizes *= every_extent[-1]
        kinds, which_kind = np.unique(sizes, return_inverse=True)
        return _Sizes(weight, ~np.isnan(sizes), kinds, which_kind, every_extent, every_rows)

    def _is_one_reduction(self) -> Array:
        """Whether all that is pending under a placement is so in one reduction."""
        valid: Array = np.ones(len(self.states), bool)
        for i, j in combinations(range(len(self.pieces)), 2):
            for a, b in product(self.locations[i], self.locations[j]):
                if isinstance(a, str) and isinstance(b, str) and a != b:
                    valid &= (self.states[:, i] != self.locations[i].index(a)) | (
                        self.states[:, j] != self.locations[j].index(b)
                    )
        return valid

    def _kept(self, piece: int, leaves: set[int]) -> list[int]:
        """Where a piece is, by number, as far as these leaves show: else -1."""
        locations = self.locations[piece]
        return [i if _leaves(where) & leaves else -1 for i, where in enumerate(locations)]

    def _extent(self, dim: Dim, leaves: Sequence[int], key: Sequence[int]) -> tuple[float, float]:
        """How many elements of a dimension the fullest rank holds, NaN where there are too few, and
        the rows within it."""
        given: list[tuple[Axes, tuple[int, ...] | None]] = []
        for leaf in leaves:
            held = [
                piece
                for piece, locations, at in zip(self.pieces, self.locations, key, strict=True)
                if at >= 0 and leaf in _leaves(locations[at])
            ]
            axes = merge_axes(tuple(held))
            given.append((axes, self.parts(leaf, axes) if self.parts and axes else None))
        return _extent_of(dim, tuple(given), self.costs.mesh)


@lru_cache(maxsize=1 << 16)
def _extent_of(
    dim: Dim, given: tuple[tuple[Axes, tuple[int, ...] | None], ...], mesh: Mesh
) -> tuple[float, float]:
    """Elements of a dimension with these axes that the fullest rank holds, and the rows within."""
    split = with_axes(dim, iter(given))
    return estimated_size(split, mesh, 0), rows_within(split, mesh)


def _leaves(where: Location) -> set[int]:
    return set(where) if isinstance(where, tuple) else set()


class Unordered(Exception):
    """ReshardGraph of which no order of all pieces is that on every leaf, or between which single
    steps do not lead."""


Cuts = dict[str, list[int]]


def _cuts(axes: Iterable[Axes]) -> Cuts:
    """Where each mesh axis must be cut so that all sub-axes in use are unions of pieces."""
    cuts: dict[str, set[int]] = {}
    for axis in (a for group in axes for a in group):
        cuts.setdefault(axis.name, set()).update((axis.pre, axis.pre * axis.size))
    ordered = {name: sorted(at) for name, at in cuts.items()}
    if any(b % a for at in ordered.values() for a, b in pairwise(at)):
        raise Unordered
    return ordered


def _refined(axes: Axes, cuts: Cuts) -> Axes:
    """The same as pieces."""
    pieces: list[Axis] = []
    for axis in axes:
        at = [c for c in cuts[axis.name] if axis.pre <= c <= axis.pre * axis.size]
        pieces += [Axis(axis.name, b // a, a) for a, b in pairwise(at)]
    return tuple(pieces)


def _places(
    factor_sharding: FactorSharding, cuts: Cuts, factors: TensorFactors
) -> dict[Axis, Location]:
    """Where each piece of an axis is in a placement."""
    slots: dict[Axis, Slot] = defaultdict(tuple)
    for leaf, axes in enumerate(factor_sharding.leaves):
        for piece in _refined(axes, cuts):
            slots[piece] += (leaf,)
    assert all(len({factors.dim_of_leaf[i] for i in slot}) == 1 for slot in slots.values())
    return {
        **slots,
        **dict.fromkeys(_refined(factor_sharding.partial, cuts), factor_sharding.reduce),
    }


def _ordered(chains: Iterable[Axes], found: Iterable[Mapping[Axis, Location]]) -> list[Axis]:
    """All pieces, such that those on a leaf are in their order there."""
    sorter: TopologicalSorter[Axis] = TopologicalSorter()
    for places in found:
        for piece in sorted(places, key=lambda a: (a.name, a.pre)):
            sorter.add(piece)
    for chain in chains:
        for before, after in pairwise(chain):
            sorter.add(after, before)
    try:
        return list(sorter.static_order())
    except CycleError:
        raise Unordered from None
