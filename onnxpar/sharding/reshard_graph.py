"""The graph of all factor shardings of a tensor. Its edges are single collectives and local cuts;
the cheapest reshard is a shortest path.

A state (a vertex) has a location for each sub-axis of the mesh: unused, on a slot (one leaf, or one
leaf in each of several segments of a dimension), or in a partial reduction. The sub-axes on a leaf
are in mesh order: only the last sub-axis can leave, and only a later one can join.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import combinations, product
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from onnxpar.base.arrays import Array
from onnxpar.cost.cost import Costs
from onnxpar.graph.collectives import LOCAL_STEPS
from onnxpar.layout.layout import ReduceOp
from onnxpar.layout.mesh import Axes, Axis, in_mesh_order, merge_axes
from onnxpar.sharding.factors import TensorFactors
from onnxpar.sharding.numbering import Numbering
from onnxpar.sharding.permutes import Permutes
from onnxpar.sharding.reshard_edges import Edges, Moves
from onnxpar.sharding.reshard_steps import PERMUTE, ReshardStep, StepKinds
from onnxpar.sharding.shard_sizes import PartSizes, ShardSizes, StateSizes
from onnxpar.sharding.state import FactorSharding
from onnxpar.sharding.sub_axes import (
    Location,
    Unordered,
    cut,
    cuts_of,
    leaves_at,
    located,
    locations_in,
    ordered,
)

STEP = 1e-16
"""Seconds added to each step, so that the shorter of two paths with equal cost wins."""

MOST_DETOURS = 1 << 12
"""Largest number of states if sub-axes may be on any leaf. In a larger graph, a sub-axis may only
be at its locations in wanted shardings."""

MOST_STATES = 1 << 15
"""Largest number of states if a sub-axis may be at its location in any wanted sharding. In a larger
graph, a path has each sub-axis unused, or at its location in the start or in one other wanted
sharding."""


class ReshardGraph:
    """The factor shardings of a tensor that a path between `wanted` shardings may visit. In each, a
    sub-axis (a factor of a mesh axis) is at its location in a wanted sharding, or on any other leaf
    (a detour).

    wanted    the shardings between which paths may be asked for
    itemsize  the number of bytes of an element
    parts     gives the sizes of shards; None: default sizes

    `has_detours` is False if detours would give too many states. Errors: Unordered if the sub-axes
    on leaves (parts of dimensions) are in contradicting orders, or overlap.
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
        by_sharding = self._cut_axes()
        self.locations = self._locations(by_sharding, detours=True)
        self.has_detours = math.prod(map(len, self.locations)) <= MOST_DETOURS
        if not self.has_detours:
            self.locations = self._locations(by_sharding, detours=False)
        counts = [len(locations) for locations in self.locations]
        self.numbering = Numbering(counts)
        at = [self._number(locations) for locations in by_sharding]
        self.near: Array | None = None
        if self.numbering.most > MOST_STATES:
            near = self._between(at)
            self.numbering = Numbering(counts, np.any(near, 0))
            self.near = near[:, self.numbering.numbers]
        self.at = self.numbering.index[at]
        self.states = self.numbering.places
        shards = ShardSizes(self.sub_axes, self.locations, self.states, factors, parts)
        self.permutes = Permutes(self.sub_axes, self.locations, self.states, factors, parts)
        self.sizes = [shards.of(dims, itemsize, weight) for weight, dims in factors.costed]
        self.valid = self._is_one_reduction()

    def _cut_axes(self) -> list[dict[Axis, Location]]:
        """Sets `sub_axes`; returns the location of each sub-axis (a factor of a mesh axis) in each
        wanted sharding."""
        mesh = self.costs.mesh
        idle = [(mesh.axis(name),) for name, size in mesh.shape if size > 1]
        cuts = cuts_of([*(a for p in self.wanted for a in (*p.leaves, p.partial)), *idle])
        by_sharding = [locations_in(p, cuts, self.factors) for p in self.wanted]
        others = [dict.fromkeys(cut(axes, cuts)) for axes in idle]
        chains = [cut(axes, cuts) for p in self.wanted for axes in p.leaves]
        self.sub_axes = ordered(chains, [*by_sharding, *others])
        return by_sharding

    def _locations(
        self, by_sharding: Sequence[Mapping[Axis, Location]], detours: bool
    ) -> list[list[Location]]:
        """Returns the possible locations of each sub-axis (a factor of a mesh axis): its locations
        in wanted shardings and, with `detours`, each leaf (a part of a dimension) that has enough
        elements."""
        leaves = set(range(len(self.factors.leaves) if detours else 0)) - self.factors.open
        locations: list[list[Location]] = []
        for sub_axis in self.sub_axes:
            wanted = [places.get(sub_axis) for places in by_sharding]
            between = [(i,) for i in sorted(leaves) if self.factors.leaves[i].size >= sub_axis.size]
            locations.append(list(dict.fromkeys([None, *wanted, *between])))
        return locations

    def _number(self, places: Mapping[Axis, Location]) -> int:
        """Returns the number of the state in which sub-axes are at these locations. A sub-axis (a
        factor of a mesh axis) that is not in `places` is unused."""
        rows = zip(self.numbering.strides, self.locations, self.sub_axes, strict=True)
        return sum(s * locations.index(places.get(axis)) for s, locations, axis in rows)

    def _between(self, numbers: Sequence[int]) -> Array:
        """Returns [one of `numbers`, number of any state]: True if the second state lies between
        the first and another state of `numbers`: each sub-axis (a factor of a mesh axis) is unused,
        or where one of these two states has it."""
        is_between: Array = np.zeros((len(numbers), self.numbering.most), bool)
        strides, states = self.numbering.strides, self.numbering.places_of(np.array(numbers))
        for (i, one), (j, other) in combinations(enumerate(states), 2):
            between = np.zeros(1, int)
            for stride, places in zip(strides, zip(one, other, strict=True), strict=True):
                between = np.add.outer(between, stride * np.array(sorted({0, *places}))).reshape(-1)
            is_between[i, between] = is_between[j, between] = True
        return is_between

    def seconds(self) -> Array:
        """Returns [start, goal]: seconds of the cheapest path between two wanted shardings."""
        return self._paths()[0][:, self.at]

    def seconds_apart(self) -> Array:
        """Like `seconds`, as two matrices [2, start, goal]: seconds of the path's local cuts, and
        seconds of its collectives."""
        local: Array = np.zeros((len(self.at), len(self.at)))
        seconds, before = self._paths()
        now = np.broadcast_to(self.at, local.shape).copy()
        while True:
            last = np.take_along_axis(before, now, 1)
            rows, columns = np.nonzero(last >= 0)
            if not len(rows):
                return np.stack((local, seconds[:, self.at] - local))
            steps = last[rows, columns], now[rows, columns]
            local[rows, columns] += self.local_steps[steps]
            now[rows, columns] = steps[0]

    def _paths(self) -> tuple[Array, Array]:
        """Returns two matrices [wanted sharding, state]: seconds of the cheapest path to the state,
        and the state before the path's last step (negative if there is none)."""
        seconds: Array
        if self.near is None:
            seconds, before = dijkstra(self.graph, indices=self.at, return_predecessors=True)
            return seconds, before
        seconds, before = np.full(self.near.shape, np.inf), np.full(self.near.shape, -1)
        for i, near in enumerate(self.near):
            states = np.flatnonzero(near & self.valid)
            start = np.searchsorted(states, self.at[i])
            part = self.graph[states][:, states]
            seconds[i, states], last = dijkstra(part, indices=start, return_predecessors=True)
            before[i, states] = np.append(states, -1)[np.maximum(last, -1)]
        return seconds, before

    def steps(self, start: FactorSharding, goal: FactorSharding) -> list[ReshardStep]:
        """Returns the steps of the cheapest path between two wanted shardings, in order. Errors:
        Unordered if there is no path."""
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
        """Seconds of each single step, as a sparse matrix [state before, state after]."""
        permutes = self.permutes.edges(self.valid, self.at)
        return self._matrix([*self._moves, *(self._permuting(*each) for each in permutes)])

    @cached_property
    def local_steps(self) -> Any:
        """Seconds of each local cut, as a sparse matrix [state before, state after]."""
        return self._matrix([_only(LOCAL_STEPS, edges) for edges in self._moves])

    @cached_property
    def _moves(self) -> list[Edges]:
        states = self.numbering, self.valid
        return list(Moves(self.sub_axes, self.locations, *states, self.factors).edges())

    def _permuting(self, axes: Axes, start: Array, end: Array) -> Edges:
        """Returns the permutes that move `axes` from states `start` to states `end`, as edges."""
        changed = np.zeros((len(start), len(self.factors.dims)), bool)
        return Edges(axes, [PERMUTE], np.zeros(len(start), int), start, end, changed)

    def _matrix(self, steps: Iterable[Edges]) -> Any:
        """Returns the seconds of steps as a sparse matrix [state before, state after]."""
        every = list(steps)
        none = np.zeros(0, int)
        start = np.concatenate([none, *(edges.start for edges in every)])
        end = np.concatenate([none, *(edges.end for edges in every)])
        no_step = np.zeros((0, len(self.factors.dims)), bool)
        changed = np.concatenate([no_step, *(edges.changed for edges in every)])
        seconds = np.full(len(start), STEP)
        for at in self.sizes:
            larger = np.maximum(at.which[start], at.which[end])
            ends = np.cumsum([len(edges.start) for edges in every])[:-1]
            pairs = zip(every, np.split(larger, ends) if every else [], strict=True)
            took = [self._step_seconds(edges, own, at) for edges, own in pairs]
            seconds += at.weight * np.concatenate([none, *took])
            seconds += at.weight * self.costs.rows(1) * at.rows_moved(changed, start, end)
        # before SciPy 1.15, csgraph takes 32-bit indices only
        ends_of = start.astype(np.int32), end.astype(np.int32)
        return csr_array((seconds, ends_of), shape=(len(self.states), len(self.states)))

    def _step_seconds(self, edges: Edges, larger: Array, at: StateSizes) -> Array:
        """Returns the seconds of each step without the time for copying rows. `larger` has for each
        step the index into `at.bytes` of the larger shard, before or after the step."""
        count = len(at.bytes)
        codes = edges.kind * count + larger
        seconds = np.zeros(len(edges.kinds) * count)
        for number, kind in enumerate(edges.kinds):
            used = np.flatnonzero(np.bincount(larger[edges.kind == number]))
            seconds_of_kind = self.costs.steps(kind, edges.axes, at.bytes[used].tolist())
            seconds[number * count + used] = seconds_of_kind
        return np.asarray(seconds[codes])

    def _step(self, start: int, end: int) -> ReshardStep:
        """Returns the single step from state `start` to state `end` (indices into `states`)."""
        before, after = self.states[start], self.states[end]
        run = [i for i in range(len(self.sub_axes)) if before[i] != after[i]]
        ways = {(self.locations[i][before[i]], self.locations[i][after[i]]) for i in run}
        ends = np.array([start]), np.array([end])
        factor_shardings = self._factor_sharding(before), self._factor_sharding(after)
        if len(ways) > 1:
            (axes,) = (axes for axes, *_ in self.permutes.by_axes(*ends))
            return ReshardStep(PERMUTE, merge_axes(in_mesh_order(axes)), *factor_shardings)
        axes = tuple(self.sub_axes[i] for i in run)
        ((source, target),) = ways
        kind = StepKinds(self.factors).of(axes, source, target)
        assert kind is not None
        touched = {self.factors.dim_of_leaf[i] for i in leaves_at(source) ^ leaves_at(target)}
        changed = np.array([[dim in touched for dim in range(len(self.factors.dims))]])
        rows = sum(at.weight * at.rows_moved(changed, *ends)[0] for at in self.sizes)
        return ReshardStep(kind, merge_axes(axes), *factor_shardings, round(rows))

    def _factor_sharding(self, state: Array) -> FactorSharding:
        """Returns the factor sharding of a state (for each sub-axis, the index of its location)."""
        leaves: list[Axes] = [()] * len(self.factors.leaves)
        partial: Axes = ()
        reduce: ReduceOp = "sum"
        for sub_axis, locations, at in zip(self.sub_axes, self.locations, state, strict=True):
            location = locations[at]
            if isinstance(location, tuple):
                for leaf in location:
                    leaves[leaf] = (*leaves[leaf], located(sub_axis, location))
            elif location is not None:
                partial, reduce = (*partial, sub_axis), location
        return FactorSharding(tuple(leaves), partial, reduce)

    def _is_one_reduction(self) -> Array:
        """For each state, True if all its sub-axes (factors of mesh axes) in a partial reduction
        (each rank holds one term) have the same reduction: a tensor cannot be a partial sum and a
        partial maximum."""
        valid: Array = np.ones(len(self.states), bool)
        for i, j in combinations(range(len(self.sub_axes)), 2):
            for a, b in product(self.locations[i], self.locations[j]):
                if isinstance(a, str) and isinstance(b, str) and a != b:
                    valid &= (self.states[:, i] != self.locations[i].index(a)) | (
                        self.states[:, j] != self.locations[j].index(b)
                    )
        return valid


def _only(kinds: Collection[str], edges: Edges) -> Edges:
    """Returns those steps of `edges` that have one of these kinds."""
    chosen = np.array([kind in kinds for kind in edges.kinds], bool)[edges.kind]
    columns = (edges.kind, edges.start, edges.end, edges.changed)
    return Edges(edges.axes, edges.kinds, *(column[chosen] for column in columns))
