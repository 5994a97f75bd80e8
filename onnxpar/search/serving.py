"""What it takes to serve several readers of a tensor together, as tables."""

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
"""Entries of a table over the maker, one reader, and what is made for all readers; no more than
elimination makes."""

Paths = Callable[[ShardingDomain, ShardingDomain], Array]
"""Seconds from the placements of one end to those of another, as rows."""


@dataclass(frozen=True)
class Serving:
    """Adds tables for one tensor, or `times` as many that are alike. Within a limit on memory,
    `is_limited`, it counts who reads a copy."""

    sums: Sums
    reshard_costs: ReshardCosts
    times: int
    is_limited: bool

    def serve(
        self, produced: ShardingDomain, required: Sequence[ShardingDomain]
    ) -> tuple[dict[ShardingDomain, ShardingDomain], ShardingDomain | None]:
        """The ends by variables of their own. Where tables would be too large, each reader is
        served by itself, from what is made or from one placement that is made of it for all, which
        is returned: of up to two readers that is exact, of more nearly."""
        ends = [produced, *required]
        counts = [len(set(end.factor_shardings)) for end in ends]
        if len(ends) <= 5 and math.prod(counts) <= MOST_TOGETHER:
            at = {end: distinct(self.sums, end) for end in ends}
            together = [at[end] for end in ends]
            self.sums.add(together, partial(self._together, together))
            return at, None
        start = distinct(self.sums, produced)
        at = {produced: start}
        factor_shardings = {p.reduced() for p in produced.factor_shardings}
        factor_shardings |= {p for end in required for p in end.factor_shardings if not p.partial}
        shared = tuple(sorted(factor_shardings, key=repr))
        common = ShardingDomain(self.sums.add_variable(len(shared)), shared)
        self.sums.add([start, common], partial(self._path, start, common))
        for need, count in zip(required, counts[1:], strict=True):
            is_small = counts[0] * len(shared) * count <= MOST_DENSE
            at[need] = (self._from_either if is_small else self._from_one)(start, common, need)
        return at, common

    def _together(self, ends: Sequence[ShardingDomain]) -> Array:
        return self.times * self.reshard_costs.tree(ends)

    def _path(self, start: ShardingDomain, goal: ShardingDomain) -> Array:
        return self.times * self.reshard_costs.paths(start, goal)

    def _from_either(
        self, produced: ShardingDomain, common: ShardingDomain, need: ShardingDomain
    ) -> ShardingDomain:
        """Serves a reader from what is nearer, what is made or what is common: one table."""
        own = distinct(self.sums, need)
        self.sums.add([produced, common, own], partial(self._nearer, produced, common, own))
        return own

    def _nearer(
        self, produced: ShardingDomain, common: ShardingDomain, own: ShardingDomain
    ) -> Array:
        one = self.reshard_costs.paths(produced, own)[:, :, None, :]
        other = self.reshard_costs.onward(common, own)[:, None, :, :]
        return self.times * faster(one, other)

    def _from_one(
        self, produced: ShardingDomain, common: ShardingDomain, need: ShardingDomain
    ) -> ShardingDomain:
        """The same by tables over pairs, which have the same least sum: a variable of the reader's
        own also says what it is served from, and within a limit, whether by a copy or as that is.
        Of two sums, the source that makes the larger one less counts."""
        factor_shardings = tuple(dict.fromkeys(need.factor_shardings))
        copied = tuple(is_copy for _, is_copy in self._kinds for _ in factor_shardings)
        values = factor_shardings * len(self._kinds)
        own = replace(_restated(self.sums, need, values), copied=copied)
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
        """The source by number, and whether the reader takes a copy; without a limit, that does not
        count."""
        return [(n, is_copy) for is_copy in (False, True)[not self.is_limited :] for n in (0, 1)]

    def _from(
        self, number: int, paths: Paths, source: ShardingDomain, goal: ShardingDomain
    ) -> Array:
        """What a source takes to serve the placements of a goal, in each kind; nothing where it
        does not serve them."""
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


def distinct(sums: Sums, end: ShardingDomain) -> ShardingDomain:
    """The same by a variable whose values are the placements, where these are fewer."""
    factor_shardings = tuple(dict.fromkeys(end.factor_shardings))
    if end.variable is None or len(factor_shardings) == len(end.factor_shardings):
        return end
    return _restated(sums, end, factor_shardings)


def _restated(
    sums: Sums, end: ShardingDomain, factor_shardings: tuple[FactorSharding, ...]
) -> ShardingDomain:
    """The same by a new variable with these placements, of which some may be equal."""
    restated = ShardingDomain(sums.add_variable(len(factor_shardings)), factor_shardings)

    def allowed() -> Array:
        at: dict[FactorSharding, list[int]] = defaultdict(list)
        for i, factor_sharding in enumerate(factor_shardings):
            at[factor_sharding].append(i)
        values = np.full((len(end.factor_shardings), len(factor_shardings)), np.inf)
        for i, factor_sharding in enumerate(end.factor_shardings):
            values[i, at[factor_sharding]] = 0
        return values

    sums.forbid([end, restated], allowed)
    return restated
