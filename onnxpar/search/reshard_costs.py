"""What every reshard of a tensor costs: shortest paths over its placements, whose edges are single
collectives and local cuts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from onnxpar.arrays import Array
from onnxpar.factors import TensorFactors, with_axes
from onnxpar.layout import ReduceOp
from onnxpar.mesh import Axes, Axis, parts_over
from onnxpar.reshard import Bytes, cuts_of, refined
from onnxpar.search.cost import Costs
from onnxpar.sharding import Placement, covered_axes, overlaps

Slot = tuple[int, ...]
"""Leaves of one dimension that hold an axis together: one, or one of each segment."""


@dataclass(frozen=True)
class _State:
    """A placement, with the pieces of axes of each leaf in the order in which they split it."""

    leaves: tuple[Axes, ...]
    partial: Axes
    reduce: ReduceOp

    def split(self, slot: Slot, run: Axes) -> _State:
        """With the leaves of a slot split once more."""
        leaves = tuple((*a, *run) if i in slot else a for i, a in enumerate(self.leaves))
        return _State(leaves, self.partial, self.reduce)

    def joined(self, slot: Slot, count: int) -> _State:
        """Without the last axes of the leaves of a slot."""
        leaves = tuple(a[:-count] if i in slot else a for i, a in enumerate(self.leaves))
        return _State(leaves, self.partial, self.reduce)

    def pending(self, partial: Axes, reduce: ReduceOp) -> _State:
        """With something else pending."""
        return _State(self.leaves, partial, reduce if partial else "sum")

    def placement(self) -> Placement:
        return Placement(self.leaves, self.partial, self.reduce)


Edge = tuple[str, Axes, _State]


def reshard_seconds(
    placements: Iterable[Placement], factors: TensorFactors, size: Bytes, costs: Costs
) -> Array:
    """Seconds from each of several placements of a tensor (rows) to each (columns), by the cheapest
    way there is; `size` has the bytes that a rank holds. Shape (n, n), float64."""
    wanted = list(placements)
    cuts = cuts_of([a for p in wanted for a in (*p.leaves, p.partial)])
    assert cuts is not None, wanted
    starts = [_State(*_tuples(refined(p, cuts))) for p in wanted]
    ways = _Ways(starts, factors)
    index = {state: i for i, state in enumerate(dict.fromkeys(starts))}
    bytes_of: dict[_State, float] = {}
    seconds: dict[tuple[int, int], float] = {}
    queue = list(index)
    for state in queue:
        here = bytes_of.setdefault(state, size(state.placement()))
        for kind, axes, after in ways.edges(state):
            if after not in index:
                index[after] = len(index)
                queue.append(after)
            there = bytes_of.setdefault(after, size(after.placement()))
            edge = index[state], index[after]
            step = costs.step(kind, axes, max(here, there))
            seconds[edge] = min(step, seconds.get(edge, np.inf))
    at = [index[s] for s in starts]
    ends = np.array(list(seconds), np.int32).reshape(-1, 2).T
    graph = csr_array((list(seconds.values()), (*ends,)), shape=(len(index), len(index)))
    found: Array = dijkstra(graph, indices=at)[:, at]
    return found


def _tuples(parts: tuple[list[Axes], Axes, ReduceOp]) -> tuple[tuple[Axes, ...], Axes, ReduceOp]:
    leaves, partial, reduce = parts
    return tuple(leaves), partial, reduce


class _Ways:
    """The single steps between placements of a tensor in which each axis is where some of the
    `wanted` ones have it."""

    def __init__(self, wanted: Iterable[_State], factors: TensorFactors) -> None:
        self.factors = factors
        self.partial: dict[Axis, set[ReduceOp]] = defaultdict(set)
        held: dict[Axis, set[Slot]] = defaultdict(set)
        for state in wanted:
            for piece in {a for axes in state.leaves for a in axes}:
                held[piece] |= set(self._holders(state, piece))
            for piece in state.partial:
                self.partial[piece].add(state.reduce)
        self.slots = {piece: _differences(slots) for piece, slots in held.items()}
        pieces = sorted({*held, *self.partial}, key=lambda a: (a.name, a.pre))
        self.runs: list[Axes] = [
            run for n in range(1, len(pieces) + 1) for run in combinations(pieces, n)
        ]

    def edges(self, state: _State) -> Iterator[Edge]:
        """What one step leads to from here."""
        yield from self._reductions(state)
        yield from self._gathers(state)
        yield from self._cuts(state)

    def _holders(self, state: _State, piece: Axis) -> Iterator[Slot]:
        """The slots that hold a piece of an axis."""
        dims: dict[int, list[int]] = defaultdict(list)
        for leaf, axes in enumerate(state.leaves):
            if piece in axes:
                dims[self.factors.dim_of_leaf[leaf]].append(leaf)
        yield from map(tuple, dims.values())

    def _common(self, run: Axes) -> list[Slot]:
        """Slots that may hold all of these."""
        empty: set[Slot] = set()
        return sorted(set.intersection(*(self.slots.get(piece, empty) for piece in run)))

    def _targets(self, state: _State, run: Axes) -> Iterator[tuple[Slot, _State]]:
        """Slots that can take axes that nothing else there holds, and the placement then."""
        for slot in self._common(run):
            beside = [
                a
                for j, axes in enumerate(state.leaves)
                if not all((i, j) in self.factors.apart for i in slot if i != j)
                for a in axes
            ]
            after = state.split(slot, run)
            fits = all(parts_over(after.leaves[i]) <= self.factors.leaves[i].size for i in slot)
            if fits and not overlaps(run, [*beside, *(a for i in slot for a in state.leaves[i])]):
                yield slot, after

    def _reductions(self, state: _State) -> Iterator[Edge]:
        for run in self.runs:
            if not set(run) <= set(state.partial):
                continue
            rest = tuple(a for a in state.partial if a not in run)
            reduced = state.pending(rest, state.reduce)
            yield "AllReduce", run, reduced
            for slot, after in self._targets(reduced, run):
                if self._covers(after, slot, run):
                    yield "ReduceScatter", run, after

    def _gathers(self, state: _State) -> Iterator[Edge]:
        for gone in self.runs:
            for slot in self._common(gone):
                if any(state.leaves[i][-len(gone) :] != gone for i in slot):
                    continue
                after = state.joined(slot, len(gone))
                yield "AllGather", gone, after
                if self._covers(state, slot, gone):
                    yield from self._exchanges(after, slot, gone)

    def _exchanges(self, state: _State, source: Slot, gone: Axes) -> Iterator[Edge]:
        """What the axes that a slot has given up can be put to at once."""
        dims = self.factors.dim_of_leaf
        for target, after in self._targets(state, gone):
            if dims[target[0]] != dims[source[0]] and self._covers(after, target, gone):
                yield "AllToAll", gone, after

    def _cuts(self, state: _State) -> Iterator[Edge]:
        for run in self.runs:
            if overlaps(run, state.partial):
                continue
            for _, after in self._targets(state, run):
                yield "LocalSlice", run, after
            if any(overlaps(run, axes) for axes in state.leaves):
                continue
            for reduce in set.intersection(*(self.partial.get(piece, set()) for piece in run)):
                if not state.partial or reduce == state.reduce:
                    pending = sorted((*state.partial, *run), key=lambda a: (a.name, a.pre))
                    yield "Select", run, state.pending(tuple(pending), reduce)

    def _covers(self, state: _State, slot: Slot, axes: Axes) -> bool:
        """Whether axes split every element of the slot's dimension."""
        given = iter([(axes if i in slot else (), None) for i in range(len(state.leaves))])
        dims = [with_axes(dim, given) for dim in self.factors.dims]
        return covered_axes(dims[self.factors.dim_of_leaf[slot[0]]]) is not None


def _differences(slots: set[Slot]) -> set[Slot]:
    """These, and what some have that others lack."""
    found = set(slots)
    for a in slots:
        for b in slots:
            rest = tuple(i for i in a if i not in b)
            found |= {rest} if rest else set()
    return found


def _normal(state: _State) -> _State:
    return state if state.partial else _State(state.leaves, (), "sum")
