"""Seconds between the placements of a tensor: to each, and to several together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import permutations
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.ir.collectives import LOCAL_STEPS
from onnxpar.ir.tensors import element_bytes, shape_bytes
from onnxpar.reshard.graph import ReshardGraph
from onnxpar.reshard.planner import ReshardedTensor, cost, plan_steps
from onnxpar.reshard.sub_axes import Unordered
from onnxpar.search.solver.elimination import Table
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState

MOST_TOGETHER = 1 << 16
"""Entries of a table over the maker and all readers of a tensor."""


@dataclass(frozen=True)
class ShardingDomain:
    """A tensor's placement by the value of a variable; of no variable there is but one value.
    `copied` says by value whether a reader takes a copy of its own, where the value decides that.
    """

    variable: int | None
    factor_shardings: tuple[FactorSharding, ...]
    copied: tuple[bool, ...] | None = None


def table_of(ends: Sequence[ShardingDomain], values: Array) -> Table:
    """Values by an axis for each end as a table; an end of no variable has but one."""
    fixed = tuple(i for i, end in enumerate(ends) if end.variable is None)
    scope = tuple(end.variable for end in ends if end.variable is not None)
    return Table(scope, np.squeeze(values, axis=fixed))


class ReshardCosts:
    """Seconds between placements, the cheapest way, as rows: all of them, or `apart`, those of
    computing and those of talking."""

    def __init__(
        self,
        sharding: ShardingState,
        tensor: gs.Tensor,
        ends: Sequence[ShardingDomain],
        known: dict[Hashable, Array],
        apart: bool,
    ) -> None:
        self.sharding, self.tensor = sharding, tensor
        factor_shardings = list(dict.fromkeys(p for end in ends for p in end.factor_shardings))
        self.index = {p: i for i, p in enumerate(factor_shardings)}
        self.known, self.apart = known, apart

    @cached_property
    def seconds(self) -> Array:
        """Seconds from each placement to each; a tensor that onnxruntime needs between two nodes
        that it fuses is only ever read as it is made, unless somebody asked for its layout."""
        sharding, name = self.sharding, self.tensor.name
        if name not in sharding.factors.fused or name in sharding.pinned:
            return self._seconds
        return np.where(np.eye(len(self.index), dtype=bool), self._seconds, np.inf)

    @cached_property
    def _seconds(self) -> Array:
        sharding, name = self.sharding, self.tensor.name
        factors = sharding.factors.tensors[name]
        parts = partial(sharding.part_sizes, name) if sharding.parts else None
        size = element_bytes(self.tensor)
        key = (*self.index, factors.dims, factors.priced, size, name if parts else None)
        if key not in self.known:
            try:
                found = ReshardGraph(list(self.index), factors, sharding.costs, size, parts)
                self.known[key] = found.seconds_apart() if self.apart else found.seconds()[None]
            except Unordered:
                self.known[key] = self._one_by_one(
                    ReshardedTensor(factors, sharding.costs, size, parts)
                )
        return self.known[key]

    def _one_by_one(self, about: ReshardedTensor) -> Array:
        """The same where all placements have no common refinement."""
        seconds = np.zeros((2, len(self.index), len(self.index)))
        for start, goal in permutations(self.index, 2):
            for step in plan_steps(start, goal, about):
                took = cost([step], self._size, about.costs)
                row = 0 if step.kind in LOCAL_STEPS else 1
                seconds[row, self.index[start], self.index[goal]] += took
        return seconds if self.apart else seconds.sum(0, keepdims=True)

    @cached_property
    def again(self) -> Array:
        """The same from what was resharded already: a sum is reduced only once."""
        pending = np.array([bool(p.partial) for p in self.index])
        return np.where(pending[:, None] & ~pending[None, :], np.inf, self.seconds)

    def paths(self, start: ShardingDomain, goal: ShardingDomain) -> Array:
        """Seconds from each placement as it is made to each goal."""
        found: Array = self.seconds[self._pairs(start, goal)]
        return found

    def onward(self, start: ShardingDomain, goal: ShardingDomain) -> Array:
        """The same from what was resharded already."""
        found: Array = self.again[self._pairs(start, goal)]
        return found

    def tree(self, ends: Sequence[ShardingDomain]) -> Array:
        """Seconds to serve all but the first of several ends from that, each from whatever is there
        by then, in the best order."""
        count = len(ends)
        best: Array | None = None
        for order in permutations(range(1, count)):
            total: Array = np.zeros([len(self.seconds), *[1] * count])
            for n, goal in enumerate(order):
                step = _spread(self.paths(ends[0], ends[goal]), 0, goal, count)
                for source in order[:n]:
                    onward = self.onward(ends[source], ends[goal])
                    step = faster(step, _spread(onward, source, goal, count))
                total = total + step
            best = total if best is None else faster(best, total)
        assert best is not None
        return best

    def sizes(self, end: ShardingDomain) -> Array:
        """Bytes that a rank holds, by the sizes that costs are computed at and by the placements of
        an end."""
        each = [self.sharding.costed_shapes(self.tensor.name, at) for at in end.factor_shardings]
        held = [[float(shape_bytes(self.tensor, shape)) for _, shape in some] for some in each]
        by_size: Array = np.array(held).T
        return by_size

    def _size(self, factor_sharding: FactorSharding) -> float:
        return mean_bytes(self.tensor, factor_sharding, self.sharding)

    def differ(self, *ends: ShardingDomain) -> Array:
        """Where the placement of the last of several ends is none of the others."""
        *others, last = np.ix_(*map(self._at, ends))
        found: Array = np.logical_and.reduce(np.broadcast_arrays(*(o != last for o in others)))
        return found

    def _pairs(self, start: ShardingDomain, goal: ShardingDomain) -> Any:
        """Where the seconds from the placements of one end to those of another are."""
        return slice(None), self._at(start)[:, None], self._at(goal)[None, :]

    def _at(self, end: ShardingDomain) -> Array:
        """The placements of an end by number."""
        return np.array([self.index[p] for p in end.factor_shardings])


def faster(one: Array, other: Array) -> Array:
    """Of rows of seconds that belong together, those of which the sum is smaller."""
    if len(one) == 1:
        return np.minimum(one, other)
    return np.where(one.sum(0) <= other.sum(0), one, other)


def _spread(values: Array, row: int, column: int, count: int) -> Array:
    """Rows of matrices as rows of arrays of `count` axes, of which two are their own."""
    if row > column:
        values, row, column = values.swapaxes(1, 2), column, row
    shape = [1] * count
    shape[row], shape[column] = values.shape[1:]
    return values.reshape(len(values), *shape)
