"""Tables for the cost of resharding one tensor for several readers together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.search.reshard_costs import MOST_TOGETHER, ReshardCosts, ShardingDomain, faster
from onnxpar.search.sums import Sums
from onnxpar.sharding.state import FactorSharding

MOST_DENSE = 1 << 20
"""Most entries of a table over the producer, one reader, and the common copy for all readers;
elimination builds no larger ones."""

Paths = Callable[[ShardingDomain, ShardingDomain], Array]
"""A function from two domains to the seconds from each sharding of the first to each of the second,
with a row for each sum."""


@dataclass(frozen=True)
class Serving:
    """Adds the tables of one tensor that several nodes read, to a search.

    sums           the variables and tables of the search
    reshard_costs  the seconds of the tensor's reshards
    times          how many equal tensors there are
    is_limited     True if memory is limited; variables then also decide which readers take a copy
    """

    sums: Sums
    reshard_costs: ReshardCosts
    times: int
    is_limited: bool

    def serve(
        self, produced: ShardingDomain, required: Sequence[ShardingDomain]
    ) -> tuple[dict[ShardingDomain, ShardingDomain], ShardingDomain | None]:
        """Adds the tables for a tensor with the domain `produced` whose readers have the domains
        `required`. Returns ({each of these domains: the domain that tables use for it, which may
        have a variable of its own}, the domain of a copy common to all readers, or None).

        One table over all readers has the exact cost. If it would be too large, each reader gets a
        table of its own, for a reshard from the tensor or from one common copy of the tensor. That
        is exact for up to two readers, and nearly so for more.
        """
        domains = [produced, *required]
        counts = [len(domain.distinct) for domain in domains]
        if len(domains) <= 5 and math.prod(counts) <= MOST_TOGETHER:
            at = {domain: distinct(self.sums, domain) for domain in domains}
            together = [at[domain] for domain in domains]
            self.sums.add(together, partial(self._together, together))
            return at, None
        start = distinct(self.sums, produced)
        at = {produced: start}
        factor_shardings = {p.reduced() for p in produced.distinct}
        factor_shardings |= {p for d in required for p in d.distinct if not p.partial}
        shared = tuple(sorted(factor_shardings, key=repr))
        common = ShardingDomain(self.sums.add_variable(len(shared)), shared)
        self.sums.add([start, common], partial(self._path, start, common))
        for reader, count in zip(required, counts[1:], strict=True):
            is_small = counts[0] * len(shared) * count <= MOST_DENSE
            at[reader] = (self._from_either if is_small else self._from_one)(start, common, reader)
        return at, common

    def _together(self, ends: Sequence[ShardingDomain]) -> Array:
        """The seconds of the reshards from the first domain to all others."""
        return self.times * self.reshard_costs.tree(ends)

    def _path(self, start: ShardingDomain, goal: ShardingDomain) -> Array:
        """The seconds of one reshard."""
        return self.times * self.reshard_costs.paths(start, goal)

    def _from_either(
        self, produced: ShardingDomain, common: ShardingDomain, reader: ShardingDomain
    ) -> ShardingDomain:
        """Adds one table for a reader that reshards the tensor or the common copy, whichever is
        faster; returns the domain that the table uses for the reader."""
        own = distinct(self.sums, reader)
        self.sums.add([produced, common, own], partial(self._nearer, produced, common, own))
        return own

    def _nearer(
        self, produced: ShardingDomain, common: ShardingDomain, own: ShardingDomain
    ) -> Array:
        """The seconds to a reader from the tensor or from the common copy, whichever is faster."""
        one = self.reshard_costs.paths(produced, own)[:, :, None, :]
        other = self.reshard_costs.onward(common, own)[:, None, :, :]
        return self.times * faster(one, other)

    def _from_one(
        self, produced: ShardingDomain, common: ShardingDomain, reader: ShardingDomain
    ) -> ShardingDomain:
        """Has the purpose of `_from_either`, but adds two smaller tables, with an equal least sum:
        the reader's own variable also decides from which of the two it reshards and, if memory is
        limited, whether it takes a copy or reads in place. With two sums, it chooses so that the
        larger sum is smaller."""
        factor_shardings = reader.distinct
        copied = tuple(is_copy for _, is_copy in self._kinds for _ in factor_shardings)
        values = factor_shardings * len(self._kinds)
        own = replace(_restated(self.sums, reader, values), copied=copied)
        goal = ShardingDomain(None, factor_shardings)
        self.sums.add(
            [produced, own], partial(self._from, 0, self.reshard_costs.paths, produced, goal)
        )
        self.sums.add(
            [common, own], partial(self._from, 1, self.reshard_costs.onward, common, goal)
        )
        return own

    @property
    def _kinds(self) -> list[tuple[int, bool]]:
        """(source: 0 the tensor, 1 the common copy; True if the reader takes a copy of it) for each
        choice of a reader; without a limit on memory, a reader always takes a copy."""
        return [(n, is_copy) for is_copy in (False, True)[not self.is_limited :] for n in (0, 1)]

    def _from(
        self, number: int, paths: Paths, source: ShardingDomain, goal: ShardingDomain
    ) -> Array:
        """Returns the seconds from a source to the shardings of a goal, for each of `_kinds` in
        turn; 0 for the kinds with the other source. `number` is the number of the source."""
        seconds, is_same = (
            self.times * paths(source, goal),
            ~self.reshard_costs.differ(source, goal),
        )
        parts = [
            np.zeros_like(seconds)
            if n != number
            else np.where(self.is_limited & (is_same == is_copy), np.inf, seconds)
            for n, is_copy in self._kinds
        ]
        return np.concatenate(parts, axis=-1)


def distinct(sums: Sums, domain: ShardingDomain) -> ShardingDomain:
    """Returns the domain with a new variable that has one value for each different sharding; the
    domain itself if its shardings all differ."""
    factor_shardings = domain.distinct
    if domain.variable is None or len(factor_shardings) == len(domain.factor_shardings):
        return domain
    return _restated(sums, domain, factor_shardings)


def _restated(
    sums: Sums, domain: ShardingDomain, factor_shardings: tuple[FactorSharding, ...]
) -> ShardingDomain:
    """Returns the domain with a new variable for these shardings, some of which may be equal; adds
    a table that allows only equal shardings of both variables."""
    restated = ShardingDomain(sums.add_variable(len(factor_shardings)), factor_shardings)

    def allowed() -> Array:
        at: dict[FactorSharding, list[int]] = defaultdict(list)
        for i, factor_sharding in enumerate(factor_shardings):
            at[factor_sharding].append(i)
        values = np.full((len(domain.factor_shardings), len(factor_shardings)), np.inf)
        for i, factor_sharding in enumerate(domain.factor_shardings):
            values[i, at[factor_sharding]] = 0
        return values

    sums.forbid([domain, restated], allowed)
    return restated
