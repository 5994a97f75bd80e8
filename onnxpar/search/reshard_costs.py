"""Seconds of the reshards of a tensor from one factor sharding to another, or to the shardings of
several readers together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import permutations
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.tensors import element_bytes, shape_bytes
from onnxpar.search.reshard_tables import ReshardTables
from onnxpar.search.solver.elimination import Table
from onnxpar.sharding.reshard_planner import ReshardedTensor
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState

MOST_TOGETHER = 1 << 16
"""Most entries of a table over the producer and all readers of a tensor."""


@dataclass(frozen=True)
class ShardingDomain:
    """The sharding of a tensor at one place of the graph, for each value of a variable; without a
    variable, there is only one sharding. `copied` says for each value if the reader takes a copy of
    its own; it is None if the value does not decide that."""

    variable: int | None
    factor_shardings: tuple[FactorSharding, ...]
    copied: tuple[bool, ...] | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.variable, self.factor_shardings, self.copied))

    @cached_property
    def distinct(self) -> tuple[FactorSharding, ...]:
        """The shardings, each once, in the order of the first values that have them."""
        return tuple(dict.fromkeys(self.factor_shardings))

    @cached_property
    def which(self) -> Array:
        """For each value, the place of its sharding in `distinct`."""
        at = {p: i for i, p in enumerate(self.distinct)}
        return np.array([at[p] for p in self.factor_shardings], int)

    def mapped(self, each: Sequence[FactorSharding]) -> ShardingDomain:
        """The domain with the same variable and these shardings instead of the `distinct` ones."""
        return ShardingDomain(self.variable, tuple(each[i] for i in self.which.tolist()))

    def reduced(self) -> ShardingDomain:
        """The domain with the same variable, after the reduction of partial shardings."""
        return self.mapped([p.reduced() for p in self.distinct])


@dataclass(frozen=True)
class Holders:
    """The ranks whose memory counts, each with the weight of its bytes: all ranks that may differ,
    or None for the one with the largest shards. `profiles` is the number of typical sizes."""

    ranks: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    profiles: int = 1


def table_of(domains: Sequence[ShardingDomain], values: Array) -> Table:
    """The table over the variables of these domains. `values` has an axis for each domain, of
    length 1 for a domain without a variable."""
    fixed = tuple(i for i, domain in enumerate(domains) if domain.variable is None)
    scope = tuple(domain.variable for domain in domains if domain.variable is not None)
    return Table(scope, np.squeeze(values, axis=fixed))


class ReshardCosts:
    """Seconds of reshards of one tensor between all these factor shardings, by the cheapest path.
    The first axis of a result is the sum: one row with all seconds, or, if `apart`, one with those
    of compute and one with those of communication."""

    def __init__(
        self,
        sharding: ShardingState,
        tensor: gs.Tensor,
        shardings: Iterable[FactorSharding],
        known: ReshardTables | None,
        apart: bool,
        holders: Holders,
    ) -> None:
        self.sharding, self.tensor, self.holders = sharding, tensor, holders
        self.index = {p: i for i, p in enumerate(dict.fromkeys(shardings))}
        self.known, self.apart = known, apart
        self._places: dict[ShardingDomain, Array] = {}
        factors = sharding.factors.tensors[tensor.name]
        is_uneven = bool(sharding.parts or sharding.costs.topology.shares)
        parts = partial(sharding.parts_of_leaf, tensor.name) if is_uneven else None
        self._about = ReshardedTensor(factors, sharding.costs, element_bytes(tensor), parts)
        own = tensor.name if sharding.parts else None
        self.key = factors.dims, factors.priced, factors.open, self._about.itemsize, own
        if known is not None:
            known.add(self.key, self.index)

    @cached_property
    def seconds(self) -> Array:
        """Seconds from each sharding to each other; infinite for a tensor between nodes that
        onnxruntime fuses, which must not be resharded, unless its layout was requested."""
        sharding, name = self.sharding, self.tensor.name
        if name not in sharding.factors.fused or name in sharding.pinned:
            return self._seconds
        return np.where(np.eye(len(self.index), dtype=bool), self._seconds, np.inf)

    @cached_property
    def _seconds(self) -> Array:
        about = self._about
        assert self.known is not None, "made for sizes alone"
        return self.known.of(self.key, list(self.index), about, self._size, self.apart)

    @cached_property
    def again(self) -> Array:
        """Seconds from each sharding to each other for a further reshard of a copy. It may not
        reduce a partial sharding (infinite seconds), because a sum is reduced only once."""
        partial = np.array([bool(p.partial) for p in self.index])
        return np.where(partial[:, None] & ~partial[None, :], np.inf, self.seconds)

    def paths(self, start: ShardingDomain, goal: ShardingDomain) -> Array:
        """Seconds from each sharding of the tensor (`start`) to each goal."""
        seconds: Array = self.seconds[self._pairs(start, goal)]
        return seconds

    def onward(self, start: ShardingDomain, goal: ShardingDomain) -> Array:
        """Seconds from each sharding of a copy that a reshard has made (`start`) to each goal."""
        seconds: Array = self.again[self._pairs(start, goal)]
        return seconds

    def tree(self, domains: Sequence[ShardingDomain]) -> Array:
        """Seconds of the reshards from the first domain to all others, in the best order: each copy
        is made from the first, or from a copy made before."""
        count = len(domains)
        steps = {
            (source, goal): _spread(
                (self.onward if source else self.paths)(domains[source], domains[goal]),
                source,
                goal,
                count,
            )
            for source, goal in permutations(range(count), 2)
            if goal
        }
        best: Array | None = None
        for order in permutations(range(1, count)):
            total: Array = np.zeros([len(self.seconds), *[1] * count])
            for n, goal in enumerate(order):
                step = steps[0, goal]
                for source in order[:n]:
                    step = faster(step, steps[source, goal])
                total = total + step
            best = total if best is None else faster(best, total)
        assert best is not None
        return best

    def sizes(self, domain: ShardingDomain) -> Array:
        """Bytes of the shard of each holder, by profile of typical sizes and within it by holder
        (rows), and by the shardings of a domain (columns); one row if all are alike."""
        held: list[Array] = []
        factors, name = self.sharding.factors, self.tensor.name
        parts = [factors.share_over(name, at.leaves) for at in domain.distinct]
        for rank, weight in self.holders.ranks:
            each = [
                self.sharding.costed_shapes(self.tensor.name, at, rank) for at in domain.distinct
            ]
            sizes = [
                [weight * part * shape_bytes(self.tensor, shape) for _, shape in some]
                for part, some in zip(parts, each, strict=True)
            ]
            held.append(np.array(sizes, float).T[:, domain.which])
        if len(held) == 1:
            return held[0]
        by_profile = np.stack(held, 1)
        shape = (self.holders.profiles, *by_profile.shape[1:])
        return np.broadcast_to(by_profile, shape).reshape(-1, shape[-1])

    def _size(self, factor_sharding: FactorSharding) -> float:
        return mean_bytes(self.tensor, factor_sharding, self.sharding)

    def differ(self, *domains: ShardingDomain) -> Array:
        """An array with an axis for each domain: True where the sharding of the last domain differs
        from those of all others."""
        *others, last = np.ix_(*map(self._at, domains))
        all_differ: Array = np.logical_and.reduce(np.broadcast_arrays(*(o != last for o in others)))
        return all_differ

    def _pairs(self, start: ShardingDomain, goal: ShardingDomain) -> Any:
        """The index of the seconds from the shardings of one domain to those of another."""
        return slice(None), self._at(start)[:, None], self._at(goal)[None, :]

    def _at(self, domain: ShardingDomain) -> Array:
        """The indices of a domain's shardings."""
        places = self._places.get(domain)
        if places is None:
            places = np.array([self.index[p] for p in domain.distinct])[domain.which]
            self._places[domain] = places
        return places


def faster(one: Array, other: Array) -> Array:
    """For each entry, the rows of seconds of the array whose sum over rows is smaller there."""
    if len(one) == 1:
        return np.minimum(one, other)
    return np.where(one.sum(0) <= other.sum(0), one, other)


def _spread(values: Array, row: int, column: int, count: int) -> Array:
    """Reshapes the matrices in `values` to arrays with `count` axes: their rows become axis `row`,
    their columns axis `column`, and all other axes have length 1."""
    if row > column:
        values, row, column = values.swapaxes(1, 2), column, row
    shape = [1] * count
    shape[row], shape[column] = values.shape[1:]
    return values.reshape(len(values), *shape)
