"""Lower bounds on a sum of tables, by message passing.

The sum of the minima of all tables is a lower bound, which rises if costs are moved between tables
that share a variable. This is the sequential method of V. Kolmogorov,
"A new look at reweighted message passing" (2015), which goes over the variables forwards and
backwards. For most problems of the search, the bound reaches the least sum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from onnxpar.base.arrays import Array
from onnxpar.search.solver.elimination import Table


@dataclass(frozen=True)
class _Share:
    """A table, seen from one of its variables.

    values       the values of the table, which change in place, with four axes: the table's first
                 variable; all others before this variable; this variable; all variables after it
    has_earlier  True if another variable of the table is earlier in the order of variables
    has_later    True if another variable of the table is later in that order
    """

    values: Array
    has_earlier: bool
    has_later: bool

    def least(self) -> Array:
        """Returns the minimum of the table for each value of the variable."""
        first, before, _, after = self.values.shape
        minima: Array = np.minimum.reduce(self.values) if first > 1 else self.values[0]
        minima = np.minimum.reduce(minima) if before > 1 else minima[0]
        return np.minimum.reduce(minima, 1) if after > 1 else minima[:, 0]

    def add(self, costs: Array) -> None:
        """Adds costs to the table, one for each value of the variable."""
        self.values[...] += costs[:, None]


class Messages:
    """A sum of tables, written as `bound` plus other `tables`, which have no negative entries after
    `sweep`. So `bound` is a lower bound on the sum; it is infinite if every assignment is
    forbidden."""

    def __init__(self, tables: Iterable[Table], constant: float) -> None:
        self.bound = constant
        self.tables = [Table(t.scope, t.values.copy()) for t in tables]
        self._order = _along([t.scope for t in self.tables])
        at = {variable: i for i, variable in enumerate(self._order)}
        self._shares: dict[int, list[_Share]] = defaultdict(list)
        for table in self.tables:
            places = [at[v] for v in table.scope]
            for axis, (variable, place) in enumerate(zip(table.scope, places, strict=True)):
                sizes = table.values.shape
                ahead = sizes[0] if axis else 1, math.prod(sizes[1:axis])
                values = table.values.reshape(*ahead, sizes[axis], -1)
                ends = (min(places) < place, max(places) > place)
                self._shares[variable].append(_Share(values, *ends))

    @property
    def entries(self) -> int:
        """The number of entries of all tables."""
        return sum(table.values.size for table in self.tables)

    def sweep(self, rounds: int) -> None:
        """Moves costs between tables along the order of variables and back, `rounds` times, which
        raises `bound`."""
        kept: dict[int, Array] = {v: np.zeros(1) for v in self._order}
        for order in [self._order, self._order[::-1]] * rounds:
            ahead = order is self._order
            for variable in order:
                kept[variable] = self._pass_on(variable, kept[variable], ahead)
        for variable, costs in kept.items():
            self._shares[variable][0].add(costs)
        for table in self.tables:
            least = float(table.values.min())
            if np.isfinite(least):
                self.bound += least
                table.values[...] -= least

    def slack(self) -> dict[int, Array]:
        """Returns, for each variable, an array with an entry for each of its values: a lower bound
        on the sum if the variable has that value, minus `bound`."""
        zero: Array = np.zeros(1)
        return {v: sum((s.least() for s in self._shares[v]), zero) for v in self._order}

    def _pass_on(self, variable: int, kept: Array, ahead: bool) -> Array:
        """Takes the minima of a variable's tables for each of its values out of the tables, adds
        the costs `kept`, and distributes all to the tables that have later variables (earlier ones
        if not `ahead`). Returns the costs that are not distributed."""
        shares = self._shares[variable]
        minima = [share.least() for share in shares]
        total = sum(minima, start=kept)
        least = float(total.min())
        self.bound += least
        if math.isinf(least):
            return np.zeros(1)
        total = total - least
        later = [s.has_later if ahead else s.has_earlier for s in shares]
        earlier = sum(s.has_earlier if ahead else s.has_later for s in shares)
        count = max(sum(later), earlier, 1)
        each = total / count
        has_forbidden = math.isinf(total.max())
        for share, is_later, had in zip(shares, later, minima, strict=True):
            if has_forbidden:
                had = np.where(np.isinf(had), 0.0, had)
            share.add(each - had if is_later else -had)
        if sum(later) == count:
            return np.zeros(1)
        rest: Array = total * (1 - sum(later) / count)
        return rest


def _along(scopes: Sequence[Sequence[int]]) -> list[int]:
    """Returns the variables of these scopes, in an order that keeps variables of one table close to
    each other."""
    if not scopes:
        return []
    variables = sorted({v for scope in scopes for v in scope})
    at = {variable: i for i, variable in enumerate(variables)}
    pairs = {(at[a], at[b]) for scope in scopes for a in scope for b in scope}
    rows, columns = np.array(sorted(pairs)).T
    near = csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(at), len(at)))
    return [variables[i] for i in reverse_cuthill_mckee(near, symmetric_mode=True)]
