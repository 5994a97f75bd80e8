"""Minimum of a sum of tables that are too connected for elimination alone: values that no smaller
sum has are pruned until elimination can do the rest.

`message_passing.py` bounds the sum from below for each value. Elimination among the values with low
bounds finds a small sum; values whose bound is above that sum are pruned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.search.solver.elimination import ENTRIES, Elimination, Table, diagonal
from onnxpar.search.solver.message_passing import Messages

CLOSE = 1e-12
"""Share by which a sum may be above its bound and be the least."""
FEW = 1 << 12
"""Entries of a table that may come of eliminating a variable before there is a bound."""
SMALL = 1 << 18
"""Entries of the largest table while a small sum is looked for."""
LARGE = 1 << 22
"""The same where that proves it to be the least."""
SWEEPS = 5
"""Forwards and backwards between two attempts."""
ATTEMPTS = 12
"""Attempts to find a small sum."""
SLOW = 0.1
"""Share of the gap between bound and sum: where a bound rises less, larger tables make it rise."""
ROOM = 1 << 21
"""Entries of all tables together, above which they do not become larger."""
NEAR = 1e-3
"""Share by which a sum may be above its bound where that is all that can be done."""
WORK = 1 << 30
"""Entries that all attempts together may read, after which there is no more of them."""


def minimize_in_parts(
    sizes: Sequence[int], tables: Sequence[Table], start: Mapping[int, int]
) -> tuple[float, list[int], bool]:
    """A small sum, the values, and whether it is the least; infinite where nothing was found. It is
    no more than the best with the values that `start` has for some variables, if few enough of the
    others depend on each other."""
    search = _Search(sizes, tables)
    search.complete(start)
    is_least = search.run()
    return search.total, search.values, is_least


@dataclass(frozen=True)
class _Level:
    """A sum behind some elimination. `kept` are the values that each variable has, as the level
    before numbers them."""

    elimination: Elimination
    kept: list[Array]

    def decide(self, values: Mapping[int, int]) -> dict[int, int]:
        """Values of all variables in the level before, from those of what is left."""
        found = self.elimination.decide(values)
        return {v: int(kept[found[v]]) for v, kept in enumerate(self.kept)}


class _Search:
    """The smallest sum that was found, its values, and what may still be in a smaller one. `here`
    has the values as the last level numbers them."""

    def __init__(self, sizes: Sequence[int], tables: Iterable[Table]) -> None:
        self.given = [diagonal(table) for table in tables]
        self.total = math.inf
        self.values = [0] * len(sizes)
        self.levels: list[_Level] = []
        self.here: dict[int, int] = {}
        self.shares = [0.25, 0.25]
        self.growth = FEW
        self._enter(self.given, [np.arange(size) for size in sizes], 0.0)

    def run(self) -> bool:
        """Looks for smaller sums; returns whether there is none."""
        work = 0
        for attempt in range(ATTEMPTS):
            if not self.messages.tables:
                self._take({})
                return True
            before = self.messages.bound
            self.messages.sweep(SWEEPS)
            work += 2 * SWEEPS * self.messages.entries
            slack = self.messages.slack()
            if self._is_closed() or self._attempt(slack, attempt % 2) or not self._prune(slack):
                return True
            is_slow = self.messages.bound - before < SLOW * self._gap()
            if is_slow and self.messages.entries < ROOM:
                self.growth *= 4
            elif work > WORK or (is_slow and self._gap() < NEAR * abs(self.total)):
                break
        return self._eliminate(self.messages.slack(), self._gap(), LARGE, {})

    def complete(self, values: Mapping[int, int]) -> None:
        """Takes the best assignment with these values of some variables, if tables allow it."""
        sizes = [len(kept) for kept in self.levels[0].kept]
        kept = [np.array([values[v]]) if v in values else np.arange(s) for v, s in enumerate(sizes)]
        elimination = Elimination([len(k) for k in kept], among(self.given, dict(enumerate(kept))))
        if elimination.run(ENTRIES):
            self._take(_Level(elimination, kept).decide({}))

    def _gap(self) -> float:
        """How far what was found is above the bound, and a little."""
        if math.isinf(self.total):
            return math.inf
        return self.total - self.messages.bound + CLOSE * abs(self.total)

    def _is_closed(self) -> bool:
        if math.isinf(self.total):
            return math.isinf(self.messages.bound)
        return self.messages.bound >= self.total - CLOSE * abs(self.total)

    def _enter(self, tables: Iterable[Table], kept: list[Array], constant: float) -> None:
        """Eliminates what leaves small tables, or no larger ones."""
        elimination = Elimination([len(values) for values in kept], tables)
        elimination.run(LARGE, growth=self.growth)
        self.levels.append(_Level(elimination, kept))
        constant += elimination.constant
        self.messages = Messages(list(elimination.tables.values()), constant)

    def _attempt(self, slack: Mapping[int, Array], beside: int) -> bool:
        """Eliminates among the values of the least slack, as large a share of them as it can, or
        `beside` what was found; returns whether no smaller sum has others."""
        excess = np.sort(np.concatenate([s - s.min() for s in slack.values()]))
        excess = excess[excess > 0]
        here = self.here if beside else {}
        share = min(4 * self.shares[beside], 1.0)
        while share * len(excess) >= 1:
            most = float(excess[math.ceil(share * len(excess)) - 1])
            if self._eliminate(slack, most, SMALL, here):
                self.shares[beside] = share
                return self._is_closed() or most >= self._gap()
            share /= 2
        self.shares[beside] = share
        return self._eliminate(slack, 0.0, SMALL, here) and self._is_closed()

    def _eliminate(
        self, slack: Mapping[int, Array], most: float, limit: int, here: Mapping[int, int]
    ) -> bool:
        """Finds the least sum among values of so much slack at most, beside the least of their
        variable, and those `here`; returns whether tables of so many entries are enough."""
        kept = {
            v: np.flatnonzero((s <= s.min() + most) | (np.arange(len(s)) == here.get(v, -1)))
            for v, s in slack.items()
        }
        allowed = [kept.get(v, np.zeros(1, int)) for v in range(len(self.values))]
        elimination = Elimination([len(k) for k in allowed], among(self.messages.tables, kept))
        if not elimination.run(limit):
            return False
        if math.isfinite(elimination.constant):
            self._take(_Level(elimination, allowed).decide({}))
        return True

    def _take(self, values: Mapping[int, int]) -> None:
        """Keeps values of what is left, with the best of the others, if their sum is smaller than
        what there is."""
        found = values
        for level in reversed(self.levels):
            found = level.decide(found)
        total = sum(table.at(found) for table in self.given)
        if total < self.total:
            self.total, self.values = total, [found[v] for v in range(len(self.values))]
            self.here = {v: values[v] for v in self.levels[-1].elimination.left}

    def _prune(self, slack: Mapping[int, Array]) -> bool:
        """Leaves out values that are in no smaller sum; returns whether there may be one."""
        kept = {v: np.flatnonzero((s <= self._gap()) & np.isfinite(s)) for v, s in slack.items()}
        if not all(map(len, kept.values())):
            return False
        if any(len(kept[v]) < len(slack[v]) for v in kept):
            every = [kept.get(v, np.zeros(1, int)) for v in range(len(self.values))]
            self.here = {v: int(np.searchsorted(every[v], at)) for v, at in self.here.items()}
            self._enter(among(self.messages.tables, kept), every, self.messages.bound)
        return True


def among(tables: Iterable[Table], kept: Mapping[int, Array]) -> list[Table]:
    """The tables with these values of their variables alone."""
    return [Table(t.scope, t.values[np.ix_(*(kept[v] for v in t.scope))]) for t in tables]
