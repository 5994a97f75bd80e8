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
"""Returns the seconds from the shardings of one domain to those of another, with a row for each
sum."""


@dataclass(frozen=True)
class Serving:
    """Adds the tables of one tensor, or of `times` equal ones. If memory is limited (`is_limited`),
    variables also decide which readers take a copy."""

    sums: Sums
    reshard_costs: ReshardCosts
    times: int
    is_limited: bool

    def serve(
        self, produced: ShardingDomain, required: Sequence[ShardingDomain]
    ) -> tuple[dict[ShardingDomain, ShardingDomain], ShardingDomain | None]:
        """Adds the tables. Returns the domain that tables use for each given domain, which may have
        a variable of its own, and the domain of the common copy (None without one).

        One table over all readers has the exact cost. If it would be too large, each reader is
        served by itself, from the tensor or from one common copy of it: exact for up to two
        readers, and nearly so for more."""
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
        return self.times * self.reshard_costs.tree(ends)

    def _path(self, start: ShardingDomain, goal: ShardingDomain) -> Array:
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
        one = self.reshard_costs.paths(produced, own)[:, :, None, :]
        other = self.reshard_costs.onward(common, own)[:, None, :, :]
        return self.times * faster(one, other)

    def _from_one(
        self, produced: ShardingDomain, common: ShardingDomain, reader: ShardingDomain
    ) -> ShardingDomain:
        """Does what `_from_either` does, by two tables over pairs with the same least sum: the
        reader's own variable also decides which source it takes and, if memory is limited, whether
        it makes a copy or reads the source itself. With two sums, it takes the source that makes
        the larger sum smaller."""
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
        """The combinations of a source (0 the tensor, 1 the common copy) and True if the reader
        makes a copy of it; without a limit on memory, always True."""
        return [(n, is_copy) for is_copy in (False, True)[not self.is_limited :] for n in (0, 1)]

    def _from(
        self, number: int, paths: Paths, source: ShardingDomain, goal: ShardingDomain
    ) -> Array:
        """Seconds from a source to the shardings of a goal, for each of `_kinds` in turn; 0 where
        the kind has the other source."""
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
    """The domain with a new variable that has one value for each different sharding; the domain
    itself if its shardings all differ."""
    factor_shardings = domain.distinct
    if domain.variable is None or len(factor_shardings) == len(domain.factor_shardings):
        return domain
    return _restated(sums, domain, factor_shardings)


def _restated(
    sums: Sums, domain: ShardingDomain, factor_shardings: tuple[FactorSharding, ...]
) -> ShardingDomain:
    """The domain with a new variable for these shardings, some of which may be equal; adds a table
    that allows only equal shardings of both."""
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
