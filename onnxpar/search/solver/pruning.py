"""Minimizes a sum of tables that share too many variables for elimination alone: prunes values of
variables until elimination can do the rest.

`message_passing.py` gives a lower bound on the sum for each value. Elimination among the values
with low bounds finds a low sum; values whose bound is above that sum are pruned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.search.solver.elimination import ENTRIES, Elimination, Table, diagonal, order_within
from onnxpar.search.solver.message_passing import Messages

CLOSE = 1e-12
"""A sum that is above its lower bound by at most this share counts as the least."""
FEW = 1 << 12
"""Most entries, at first, of a table that replaces the tables of an eliminated variable; the number
grows where the bound rises slowly."""
FIRST = 0.02
"""The share of all values among which elimination looks for a low sum at first."""
AGAIN = 2
"""An attempt starts with this multiple of the last share that elimination could handle."""
SMALL = 1 << 18
"""Most entries of a table in the search for a low sum."""
LARGE = 1 << 22
"""Most entries of a table at the start of a level, and in the proof that a sum is the least."""
SWEEPS = 5
"""Sweeps of message passing, forwards and backwards, before each attempt."""
ATTEMPTS = 12
"""Most attempts to find a low sum."""
SLOW = 0.1
"""A share of the gap between bound and lowest sum: if the bound rises by less in an attempt,
elimination may build larger tables."""
ROOM = 1 << 21
"""If all tables together have more entries than this, they do not get larger."""
NEAR = 1e-3
"""A sum that is above its lower bound by at most this share is good enough once progress is
slow."""
WORK = 1 << 27
"""The number of entries that message passing may read, in all attempts together, before the search
ends."""


Start = Callable[[Sequence[int], Sequence[Table]], Mapping[int, int]]
"""A function from the sizes and tables that are left after the first eliminations, to values of
some variables to start with."""


def minimize_in_parts(
    sizes: Sequence[int],
    tables: Sequence[Table],
    start: Start,
    below: float = math.inf,
) -> tuple[float, list[int], float]:
    """Returns (a low sum, infinite if none was found; the values of the variables that give it; a
    lower bound on every sum). The sum is no higher than the best sum with the values of `start`,
    unless the other variables depend on each other too much. The search ends when no sum can be
    lower than `below`."""
    search = _Search(sizes, tables, below)
    search.complete(start(sizes, search.messages.tables))
    is_least = search.run()
    bound = search.least if is_least else min(search.messages.bound, search.least)
    return search.total, search.values, bound


@dataclass(frozen=True)
class _Level:
    """A stage of the search, after further pruning and elimination.

    elimination  the sum, after some variables were eliminated
    kept         the values of each variable that remain, numbered as in the level before
    """

    elimination: Elimination
    kept: list[Array]

    def decide(self, values: Mapping[int, int]) -> dict[int, int]:
        """Returns the best values of all variables, numbered as in the level before, given the
        values of the variables that are left."""
        assignment = self.elimination.decide(values)
        return {v: int(kept[assignment[v]]) for v, kept in enumerate(self.kept)}


class _Search:
    """The search for the least sum `below` a number.

    total   the lowest sum found
    values  the values of the variables that give it
    levels  the stages so far
    here    `values`, numbered as in the last level, for the variables that are left there
    """

    def __init__(self, sizes: Sequence[int], tables: Iterable[Table], below: float) -> None:
        self.given = [diagonal(table) for table in tables]
        self.below = below
        self.total = math.inf
        self.values = [0] * len(sizes)
        self.levels: list[_Level] = []
        self.here: dict[int, int] = {}
        self.shares = [FIRST, FIRST]
        self.growth = FEW
        self._enter(self.given, [np.arange(size) for size in sizes], 0.0)

    @property
    def least(self) -> float:
        """The number that a sum must be below to be of use: the lowest sum found, or `below`."""
        return min(self.total, self.below)

    def run(self) -> bool:
        """Looks for lower sums. Returns True if it proves that none is lower than `least`."""
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
            elif work > WORK or (is_slow and self._gap() < NEAR * abs(self.least)):
                break
        return self._eliminate(self.messages.slack(), self._gap(), LARGE, {})

    def complete(self, values: Mapping[int, int]) -> None:
        """Considers the best assignment with these values of some variables, unless that needs
        tables that are too large."""
        sizes = [len(kept) for kept in self.levels[0].kept]
        kept = [np.array([values[v]]) if v in values else np.arange(s) for v, s in enumerate(sizes)]
        elimination = _eliminated(self.messages.tables, kept, ENTRIES)
        if elimination is not None:
            self._take(_Level(elimination, kept).decide({}))

    def _gap(self) -> float:
        """Returns how far the bound is below the lowest sum found (or `below`), plus a
        tolerance."""
        if math.isinf(self.least):
            return math.inf
        return self.least - self.messages.bound + CLOSE * abs(self.least)

    def _is_closed(self) -> bool:
        """True if the bound has reached the lowest sum found, or `below`."""
        if math.isinf(self.least):
            return math.isinf(self.messages.bound)
        return self.messages.bound >= self.least - CLOSE * abs(self.least)

    def _enter(self, tables: Iterable[Table], kept: list[Array], constant: float) -> None:
        """Starts a level on these tables and the values `kept` of each variable: eliminates the
        variables whose tables do not grow much."""
        elimination = Elimination([len(values) for values in kept], tables)
        elimination.run(LARGE, growth=self.growth)
        self.levels.append(_Level(elimination, kept))
        constant += elimination.constant
        self.messages = Messages(list(elimination.tables.values()), constant)

    def _attempt(self, slack: Mapping[int, Array], keeps_found: int) -> bool:
        """Finds the least sum among the values with the least slack, for as large a share of all
        values as elimination can handle; if `keeps_found`, the values found so far are among these.
        Returns True if no sum with other values is lower."""
        excess = np.sort(np.concatenate([s - s.min() for s in slack.values()]))
        excess = excess[excess > 0]
        here = self.here if keeps_found else {}
        share = min(AGAIN * self.shares[keeps_found], 1.0)
        while share * len(excess) >= 1:
            most = float(excess[math.ceil(share * len(excess)) - 1])
            if self._eliminate(slack, most, SMALL, here):
                self.shares[keeps_found] = share
                return self._is_closed() or most >= self._gap()
            share /= 2
        self.shares[keeps_found] = share
        return self._eliminate(slack, 0.0, SMALL, here) and self._is_closed()

    def _eliminate(
        self, slack: Mapping[int, Array], most: float, limit: int, here: Mapping[int, int]
    ) -> bool:
        """Finds the least sum among the values in `here`, and all values with a slack of at most
        `most` above the least slack of their variable. Returns False if that needs tables of more
        than `limit` entries."""
        kept = {
            v: np.flatnonzero((s <= s.min() + most) | (np.arange(len(s)) == here.get(v, -1)))
            for v, s in slack.items()
        }
        allowed = [kept.get(v, np.zeros(1, int)) for v in range(len(self.values))]
        elimination = _eliminated(self.messages.tables, allowed, limit)
        if elimination is None:
            return False
        if math.isfinite(elimination.constant):
            self._take(_Level(elimination, allowed).decide({}))
        return True

    def _take(self, values: Mapping[int, int]) -> None:
        """Completes values of the variables that are left in the last level to values of all
        variables, and stores these if their sum is the lowest so far."""
        assignment = values
        for level in reversed(self.levels):
            assignment = level.decide(assignment)
        total = sum(table.at(assignment) for table in self.given)
        if total < self.total:
            self.total, self.values = total, [assignment[v] for v in range(len(self.values))]
            self.here = {v: values[v] for v in self.levels[-1].elimination.left}

    def _prune(self, slack: Mapping[int, Array]) -> bool:
        """Prunes the values that cannot be part of a lower sum. Returns False if none is left for
        some variable, so that there is no lower sum."""
        kept = {v: np.flatnonzero((s <= self._gap()) & np.isfinite(s)) for v, s in slack.items()}
        if not all(map(len, kept.values())):
            return False
        if any(len(kept[v]) < len(slack[v]) for v in kept):
            every = [kept.get(v, np.zeros(1, int)) for v in range(len(self.values))]
            self.here = {v: int(np.searchsorted(every[v], at)) for v, at in self.here.items()}
            self._enter(among(self.messages.tables, kept), every, self.messages.bound)
        return True


def _eliminated(tables: Sequence[Table], kept: Sequence[Array], limit: int) -> Elimination | None:
    """Returns the sum of the tables, among the values `kept` of each variable, after all variables
    were eliminated; None if that needs a table of more than `limit` entries."""
    sizes = [len(values) for values in kept]
    order = order_within(limit, sizes, [table.scope for table in tables])
    if order.left:
        return None
    elimination = Elimination(sizes, among(tables, dict(enumerate(kept))))
    elimination.follow(order)
    return elimination


def among(tables: Iterable[Table], kept: Mapping[int, Array]) -> list[Table]:
    """Returns the tables restricted to the values `kept` of their variables."""
    return [Table(t.scope, t.values[np.ix_(*(kept[v] for v in t.scope))]) for t in tables]
