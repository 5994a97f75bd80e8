"""The seconds of the reshards of one tensor: from one factor sharding (axes for each leaf) to
another, or to the shardings of several readers together."""

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
    """The sharding of a tensor at one place of the graph, as a function of a variable, such as the
    strategy of the node there.

    variable          the variable's number; None: there is only one sharding
    factor_shardings  the sharding for each value of the variable
    copied            for each value, True if the reader takes a copy of its own; None if the value
                      does not decide that
    """

    variable: int | None
    factor_shardings: tuple[FactorSharding, ...]
    copied: tuple[bool, ...] | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once: domains are keys of many dicts."""
        return hash((self.variable, self.factor_shardings, self.copied))

    @cached_property
    def distinct(self) -> tuple[FactorSharding, ...]:
        """The shardings without repetitions, in the order of the first values that have them."""
        return tuple(dict.fromkeys(self.factor_shardings))

    @cached_property
    def which(self) -> Array:
        """For each value, the index of its sharding in `distinct`."""
        at = {p: i for i, p in enumerate(self.distinct)}
        return np.array([at[p] for p in self.factor_shardings], int)

    def mapped(self, each: Sequence[FactorSharding]) -> ShardingDomain:
        """Returns the domain with the same variable, and the sharding `each[i]` in place of
        `distinct[i]`."""
        return ShardingDomain(self.variable, tuple(each[i] for i in self.which.tolist()))

    def reduced(self) -> ShardingDomain:
        """Returns the domain with the same variable, and its shardings after the reduction of
        partial sums."""
        return self.mapped([p.reduced() for p in self.distinct])


@dataclass(frozen=True)
class Holders:
    """The ranks whose memory counts.

    ranks     (rank, weight of its bytes): all ranks that may differ, or None for the one with the
              largest shards
    profiles  the number of typical sizes for which bytes are counted
    """

    ranks: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    profiles: int = 1


def table_of(domains: Sequence[ShardingDomain], values: Array) -> Table:
    """Returns the table over the variables of these domains. `values` has an axis for each domain,
    of length 1 for a domain without a variable."""
    fixed = tuple(i for i, domain in enumerate(domains) if domain.variable is None)
    scope = tuple(domain.variable for domain in domains if domain.variable is not None)
    return Table(scope, np.squeeze(values, axis=fixed))


class ReshardCosts:
    """The seconds of reshards of one tensor between the given factor shardings, by the cheapest
    path of steps. Axis 0 of all results is the sum: one row with all seconds or, if `apart`, a row
    for compute and a row for communication.

    shardings  all shardings that the tensor may have at any node
    known      tables that tensors share; None if the caller needs only sizes
    holders    the ranks whose bytes count
    """

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
        """Seconds from each sharding to each other. For a tensor between nodes that onnxruntime
        fuses, which must not be resharded, they are infinite, unless its layout was requested."""
        sharding, name = self.sharding, self.tensor.name
        if name not in sharding.factors.fused or name in sharding.pinned:
            return self._seconds
        return np.where(np.eye(len(self.index), dtype=bool), self._seconds, np.inf)

    @cached_property
    def _seconds(self) -> Array:
        """Seconds from each sharding to each other."""
        about = self._about
        assert self.known is not None, "made for sizes alone"
        return self.known.of(self.key, list(self.index), about, self._size, self.apart)

    @cached_property
    def again(self) -> Array:
        """Like `seconds`, for a further reshard of a copy. That may not reduce a partial sum
        (infinite seconds), because a sum is reduced only once."""
        partial = np.array([bool(p.partial) for p in self.index])
        return np.where(partial[:, None] & ~partial[None, :], np.inf, self.seconds)

    def paths(self, start: ShardingDomain, goal: ShardingDomain) -> Array:
        """Returns the seconds from each sharding of the tensor (`start`) to each of `goal`."""
        seconds: Array = self.seconds[self._pairs(start, goal)]
        return seconds

    def onward(self, start: ShardingDomain, goal: ShardingDomain) -> Array:
        """Returns the seconds from each sharding of a copy that a reshard has produced (`start`) to
        each of `goal`."""
        seconds: Array = self.again[self._pairs(start, goal)]
        return seconds

    def tree(self, domains: Sequence[ShardingDomain]) -> Array:
        """Returns the seconds of the reshards from the first domain to all others, in the best
        order: each copy is made from the first, or from a copy made before. An axis for each domain
        follows axis 0."""
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
        """Returns the bytes of a shard, [cases, shardings of the domain]: a case is a typical size
        and a rank of `holders`, in this order; one case if all are equal."""
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
        """The mean bytes of a shard, over the typical sizes."""
        return mean_bytes(self.tensor, factor_sharding, self.sharding)

    def differ(self, *domains: ShardingDomain) -> Array:
        """Returns an array with an axis for each domain: True where the sharding of the last domain
        differs from the shardings of all others."""
        *others, last = np.ix_(*map(self._at, domains))
        all_differ: Array = np.logical_and.reduce(np.broadcast_arrays(*(o != last for o in others)))
        return all_differ

    def _pairs(self, start: ShardingDomain, goal: ShardingDomain) -> Any:
        """The index into `seconds` for the shardings of two domains."""
        return slice(None), self._at(start)[:, None], self._at(goal)[None, :]

    def _at(self, domain: ShardingDomain) -> Array:
        """The indices of a domain's shardings in `seconds`, by value."""
        places = self._places.get(domain)
        if places is None:
            places = np.array([self.index[p] for p in domain.distinct])[domain.which]
            self._places[domain] = places
        return places


def faster(one: Array, other: Array) -> Array:
    """Returns, for each entry, the seconds of the array (`one` or `other`) whose sum over axis 0 is
    smaller there."""
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
