"""Lower bounds on a sum of tables: costs move between tables that share a variable, so that the sum
of what each has at least becomes large.

V. Kolmogorov, "A new look at reweighted message passing" (2015): sequential, over the variables
forwards and backwards. Of most problems of a search the bound reaches the least sum.
"""

from __future__ import annotations

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
    """A table's part in a variable: the values, which change; the axis; the shape of a vector along
    it; and whether variables before it, and behind it, are in the table."""

    values: Array
    axis: int
    shape: tuple[int, ...]
    has_earlier: bool
    has_later: bool

    def least(self) -> Array:
        """What the table has at least for each value of the variable."""
        found: Array
        if self.axis:  # long runs first, which is faster
            values = self.values.min(axis=0)
            found = values.min(axis=tuple(i for i in range(values.ndim) if i != self.axis - 1))
        else:
            found = self.values.reshape(len(self.values), -1).min(axis=1)
        return found


class Messages:
    """Tables whose sum, with `bound`, is that of the given ones, and of which none is negative
    anywhere: so `bound` is a lower one. It is infinite where nothing is allowed."""

    def __init__(self, tables: Iterable[Table], constant: float) -> None:
        self.bound = constant
        self.tables = [Table(t.scope, t.values.copy()) for t in tables]
        self._order = _along([t.scope for t in self.tables])
        at = {variable: i for i, variable in enumerate(self._order)}
        self._shares: dict[int, list[_Share]] = defaultdict(list)
        for table in self.tables:
            places = [at[v] for v in table.scope]
            for axis, (variable, place) in enumerate(zip(table.scope, places, strict=True)):
                shape = tuple(-1 if i == axis else 1 for i in range(len(places)))
                ends = (min(places) < place, max(places) > place)
                self._shares[variable].append(_Share(table.values, axis, shape, *ends))

    @property
    def entries(self) -> int:
        """How many entries the tables have."""
        return sum(table.values.size for table in self.tables)

    def sweep(self, rounds: int) -> None:
        """Moves costs along the order and back again, so many times; the bound rises."""
        kept: dict[int, Array] = {v: np.zeros(1) for v in self._order}
        for order in [self._order, self._order[::-1]] * rounds:
            ahead = order is self._order
            for variable in order:
                kept[variable] = self._pass_on(variable, kept[variable], ahead)
        for variable, costs in kept.items():
            share = self._shares[variable][0]
            share.values[...] += costs.reshape(share.shape)
        for table in self.tables:
            least = float(table.values.min())
            if np.isfinite(least):
                self.bound += least
                table.values[...] -= least

    def slack(self) -> dict[int, Array]:
        """How much more than `bound` the sum is at least, by the values of each variable."""
        zero: Array = np.zeros(1)
        return {v: sum((s.least() for s in self._shares[v]), zero) for v in self._order}

    def _pass_on(self, variable: int, kept: Array, ahead: bool) -> Array:
        """Collects what the tables of a variable have at least by its values, and shares it out to
        those with variables that come later; returns what is kept back."""
        shares = self._shares[variable]
        found = [share.least() for share in shares]
        total = sum(found, start=kept)
        least = float(total.min())
        self.bound += least
        if np.isinf(least):
            return np.zeros(1)
        total = total - least
        later = [s.has_later if ahead else s.has_earlier for s in shares]
        earlier = sum(s.has_earlier if ahead else s.has_later for s in shares)
        count = max(sum(later), earlier, 1)
        for share, is_later, had in zip(shares, later, found, strict=True):
            change = np.where(np.isinf(had), 0.0, -had)
            if is_later:
                change += total / count
            share.values[...] += change.reshape(share.shape)
        if sum(later) == count:
            return np.zeros(1)
        rest: Array = total * (1 - sum(later) / count)
        return rest


def _along(scopes: Sequence[Sequence[int]]) -> list[int]:
    """An order in which variables of one table stand close to each other."""
    if not scopes:
        return []
    variables = sorted({v for scope in scopes for v in scope})
    at = {variable: i for i, variable in enumerate(variables)}
    pairs = {(at[a], at[b]) for scope in scopes for a in scope for b in scope}
    rows, columns = np.array(sorted(pairs)).T
    near = csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(at), len(at)))
    return [variables[i] for i in reverse_cuthill_mckee(near, symmetric_mode=True)]
