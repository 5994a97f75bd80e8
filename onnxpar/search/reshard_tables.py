"""The seconds of reshards between all shardings that tensors of one shape can have, computed
together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import permutations

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.graph.collectives import LOCAL_STEPS
from onnxpar.sharding.reshard_graph import ReshardGraph
from onnxpar.sharding.reshard_planner import Bytes, ReshardedTensor, cost, plan_steps
from onnxpar.sharding.state import FactorSharding
from onnxpar.sharding.sub_axes import Unordered


class ReshardTables:
    """The seconds of reshards between shardings, for each `key`: everything else that they depend
    on, such as the dimensions and the element size. Tensors `add` their shardings first. The first
    call of `of` for a key computes the seconds between all of these in one graph, if they agree on
    the order of sub-axes, and the graph is small."""

    def __init__(self) -> None:
        self._wanted: dict[Hashable, dict[FactorSharding, int]] = {}
        self._together: dict[Hashable, Array | None] = {}
        self._alone: dict[Hashable, Array] = {}

    @property
    def entries(self) -> int:
        """The number of entries of the tables computed so far."""
        tables = (*self._together.values(), *self._alone.values())
        return sum(table.size for table in tables if table is not None)

    def add(self, key: Hashable, shardings: Iterable[FactorSharding]) -> None:
        """Announces that a tensor with this key may have these shardings."""
        wanted = self._wanted.setdefault(key, {})
        before = len(wanted)
        for sharding in shardings:
            wanted.setdefault(sharding, len(wanted))
        if len(wanted) > before:
            self._together.pop(key, None)

    def of(
        self,
        key: Hashable,
        shardings: Sequence[FactorSharding],
        about: ReshardedTensor,
        size: Bytes,
        apart: bool,
    ) -> Array:
        """Returns the seconds from each sharding to each other: one table for the sum or, if
        `apart`, one for local cuts and one for collectives.

        about  the tensor and the cost model
        size   a function from a sharding to the bytes of a shard
        """
        wanted = self._wanted[key]
        if key not in self._together:
            self._together[key] = _of_all(list(wanted), about, apart)
        at = np.array([wanted[sharding] for sharding in shardings])
        every = self._together[key]
        if every is None:  # in one order for all tensors that have the same shardings
            own, at = np.unique(at, return_inverse=True)
            alone = key, tuple(own.tolist())
            if alone not in self._alone:
                some = [sharding for sharding, i in wanted.items() if i in alone[1]]
                self._alone[alone] = _of_some(some, about, size, apart)
            every = self._alone[alone]
        return every[:, at[:, None], at[None, :]]


def _graph(shardings: Sequence[FactorSharding], about: ReshardedTensor) -> ReshardGraph:
    """The graph whose nodes are shardings, and whose edges are steps between them."""
    return ReshardGraph(shardings, about.factors, about.costs, about.itemsize, about.parts)


def _seconds(graph: ReshardGraph, apart: bool) -> Array:
    """The seconds of the cheapest paths in a graph."""
    return graph.seconds_apart() if apart else graph.seconds()[None]


def _of_all(
    shardings: Sequence[FactorSharding], about: ReshardedTensor, apart: bool
) -> Array | None:
    """Returns the seconds between all shardings, from one graph; None if the graph is too large to
    have detours, or if there is no common order of sub-axes."""
    try:
        graph = _graph(shardings, about)
    except Unordered:
        return None
    return _seconds(graph, apart) if graph.has_detours else None


def _of_some(
    shardings: Sequence[FactorSharding], about: ReshardedTensor, size: Bytes, apart: bool
) -> Array:
    """The seconds between these shardings, from one graph or, without a common order of sub-axes,
    planned pair by pair."""
    try:
        return _seconds(_graph(shardings, about), apart)
    except Unordered:
        return _one_by_one(shardings, about, size, apart)


def _one_by_one(
    shardings: Sequence[FactorSharding], about: ReshardedTensor, size: Bytes, apart: bool
) -> Array:
    """Returns the seconds from each sharding to each other, planned pair by pair, for shardings
    that have no common order of sub-axes."""
    seconds = np.zeros((2, len(shardings), len(shardings)))
    for (i, start), (j, goal) in permutations(enumerate(shardings), 2):
        for step in plan_steps(start, goal, about):
            row = 0 if step.kind in LOCAL_STEPS else 1
            seconds[row, i, j] += cost([step], size, about.costs)
    return seconds if apart else seconds.sum(0, keepdims=True)
