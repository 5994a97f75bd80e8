"""Finds the exact minimum of a sum of tables, each over a few discrete variables: eliminates one
variable after the other (Dechter, "Bucket elimination", 1999), in the (min, +) semiring."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array

LIMIT = 1 << 26
"""Most combinations of values that are tried exhaustively: 512 MB."""
ENTRIES = 1 << 20
"""Most entries of a table that `minimize` builds."""


@dataclass(frozen=True)
class Table:
    """A term of the sum, over the variables in `scope`: `values[i, j]` if the first variable has
    value i, and the second value j. An infinite entry forbids the combination."""

    scope: tuple[int, ...]
    values: Array

    def at(self, values: Sequence[int] | Mapping[int, int]) -> float:
        """Returns the entry for these values of all variables, by the variable's number."""
        return float(self.values[tuple(values[v] for v in self.scope)])


class TooLarge(Exception):
    """The variables depend on each other too much: tables would be too large to build."""


def minimize(sizes: Sequence[int], tables: Iterable[Table]) -> tuple[float, list[int]]:
    """Returns (the least sum of the tables, the value of each variable that gives it); `sizes` are
    the numbers of values of the variables.

    If a variable is twice in a scope, only the diagonal counts. The sum is infinite if every
    assignment is forbidden. Errors: TooLarge if an intermediate table would have more than ENTRIES
    entries.
    """
    diagonals = [diagonal(table) for table in tables]
    order = order_within(ENTRIES, sizes, [table.scope for table in diagonals])
    if order.left:
        raise TooLarge(f"{order.left} variables need tables of over {ENTRIES} entries")
    elimination = Elimination(sizes, diagonals)
    elimination.follow(order)
    return elimination.constant, elimination.decide({})


def every_sum(sizes: Sequence[int], tables: Iterable[Table]) -> Array:
    """Returns the sum of the tables for every combination of values, with an axis for each
    variable. Errors: TooLarge if there are more than LIMIT combinations."""
    count = math.prod(sizes)
    if count > LIMIT:
        raise TooLarge(f"{count} combinations of {len(sizes)} variables")
    scope = tuple(range(len(sizes)))
    total: Array = np.zeros(sizes)
    for table in tables:
        total += _broadcast(diagonal(table), scope)
    return total


@dataclass(frozen=True)
class Order:
    """The variables to eliminate, in order, and how many variables are `left` then."""

    variables: list[int]
    left: int


def order_within(limit: int, sizes: Sequence[int], scopes: Iterable[Sequence[int]]) -> Order:
    """Returns the order in which to eliminate variables of tables with these scopes: always the one
    that needs the smallest table, as long as that has at most `limit` entries. This only counts
    entries, so that a search soon learns whether elimination can decide all variables."""
    near: dict[int, set[int]] = {v: set() for v, size in enumerate(sizes) if size > 1}
    for scope in scopes:
        wide = near.keys() & set(scope)
        for variable in wide:
            near[variable] |= wide

    def entries(variable: int) -> int:
        """Entries of the table that the elimination of a variable needs."""
        return math.prod(sizes[v] for v in near[variable] | {variable})

    queue = [(entries(v), v) for v in near]
    heapq.heapify(queue)
    order: list[int] = []
    while queue:
        known, variable = heapq.heappop(queue)
        if variable not in near:
            continue
        needed = entries(variable)
        if needed > known:
            heapq.heappush(queue, (needed, variable))
        elif needed > limit:
            break
        else:
            order.append(variable)
            around = near.pop(variable) - {variable}
            for v in around:
                near[v] |= around
                near[v].discard(variable)
            for v in around:
                heapq.heappush(queue, (entries(v), v))
    return Order(order, len(near))


class Elimination:
    """A sum of tables after some variables were eliminated: `constant`, plus `tables` over the
    variables in `left`.

    A table whose variables are all in another table is added to that one.
    """

    def __init__(self, sizes: Sequence[int], tables: Iterable[Table]) -> None:
        self.sizes = sizes
        self.constant = 0.0
        self.tables: dict[int, Table] = {}
        self.left = {v for v, size in enumerate(sizes) if size > 1}
        self._of: dict[int, set[int]] = defaultdict(set)
        self._numbers = itertools.count()
        self._rules: list[tuple[int, tuple[int, ...], Array]] = []
        for table in tables:
            self._add(_squeezed(diagonal(table)))

    def follow(self, order: Order) -> None:
        """Eliminates the variables of this order."""
        for variable in order.variables:
            self._eliminate(variable)

    def run(self, limit: int, growth: float) -> None:
        """Eliminates variables, always the one that needs the smallest table, as long as that has
        at most `limit` entries. A variable stays if the table that replaces its tables would have
        more than `growth` entries, and more than these tables together."""
        queue = [(self._entries(v), v) for v in self.left]
        heapq.heapify(queue)
        while queue:
            known, variable = heapq.heappop(queue)
            entries = self._entries(variable) if variable in self.left else 0
            if entries > known:
                heapq.heappush(queue, (entries, variable))
            elif entries > limit:
                break
            elif entries and self._grows(variable, entries) <= growth:
                around = self._eliminate(variable)
                for v in around:
                    heapq.heappush(queue, (self._entries(v), v))

    def decide(self, values: Mapping[int, int]) -> list[int]:
        """Returns the best value of each variable, given the `values` of the variables that are
        left."""
        assignment = [values.get(v, 0) for v in range(len(self.sizes))]
        for variable, scope, best in reversed(self._rules):
            assignment[variable] = int(best[tuple(assignment[v] for v in scope)])
        return assignment

    def _add(self, table: Table) -> None:
        """Adds a table to the sum. If another table has all its variables, the two are merged; so
        are tables all of whose variables the new one has."""
        scope = set(table.scope)
        if not scope:
            self.constant += float(table.values)
            return
        for key in self._of[table.scope[0]]:
            have = self.tables[key]
            if scope <= set(have.scope):
                values = have.values + _broadcast(table, have.scope)
                self.tables[key] = Table(have.scope, values)
                return
        values = table.values
        for key in {key for v in scope for key in self._of[v]}:
            if scope >= set(self.tables[key].scope):
                values = values + _broadcast(self._take(key), table.scope)
        key = next(self._numbers)
        self.tables[key] = Table(table.scope, values)
        for variable in scope:
            self._of[variable].add(key)

    def _take(self, key: int) -> Table:
        """Removes a table from the sum; returns it."""
        table = self.tables.pop(key)
        for v in table.scope:
            self._of[v].discard(key)
        return table

    def _around(self, variable: int) -> set[int]:
        """The other variables in the tables of a variable."""
        return {v for key in self._of[variable] for v in self.tables[key].scope} - {variable}

    def _entries(self, variable: int) -> int:
        """Returns the entries of the table that must be built to eliminate a variable."""
        return self.sizes[variable] * math.prod(self.sizes[v] for v in self._around(variable))

    def _grows(self, variable: int, entries: int) -> float:
        """Returns the entries of the table that would replace a variable's tables; 0 if these have
        at least as many. `entries` is a result of `_entries`."""
        result = entries / self.sizes[variable]
        before = sum(self.tables[key].values.size for key in self._of[variable])
        return result if result > before else 0

    def _eliminate(self, variable: int) -> tuple[int, ...]:
        """Replaces the tables of a variable by the minimum of their sum over it; returns the other
        variables in these tables."""
        around = tuple(sorted(self._around(variable)))
        scope = (*around, variable)
        total: Array = np.zeros([self.sizes[v] for v in scope])
        for key in list(self._of[variable]):
            total += _broadcast(self._take(key), scope)
        best = total.argmin(axis=-1)
        self._rules.append((variable, around, best.astype(np.int32)))
        self.left.discard(variable)
        self._add(Table(around, np.take_along_axis(total, best[..., None], -1)[..., 0]))
        return around


def diagonal(table: Table) -> Table:
    """Returns the table with each variable only once in its scope: of a table over (3, 3), the
    entries [i, i]."""
    scope = tuple(dict.fromkeys(table.scope))
    if len(scope) == len(table.scope):
        return table
    letters = [scope.index(v) for v in table.scope]
    return Table(scope, np.einsum(table.values, letters, list(range(len(scope)))))


def _squeezed(table: Table) -> Table:
    """Returns the table without the variables that have only one value."""
    sizes = table.values.shape
    scope = tuple(v for v, size in zip(table.scope, sizes, strict=True) if size > 1)
    return Table(scope, table.values.reshape([size for size in sizes if size > 1]))


def _broadcast(table: Table, scope: Sequence[int]) -> Array:
    """Returns the values of a table, reshaped so that they broadcast over the axes of a larger
    scope."""
    order = [scope.index(v) for v in table.scope]
    values = np.transpose(table.values, np.argsort(order))
    shape = iter(values.shape)
    return values.reshape([next(shape) if i in order else 1 for i in range(len(scope))])
