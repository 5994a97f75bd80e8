"""Minimum of a sum of tables, each over a few discrete variables: exact, by eliminating one
variable after the other (Dechter, "Bucket elimination", 1999), in the (min, +) semiring."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.arrays import Array
from onnxpar.search.orders import elimination_order

LIMIT = 1 << 26
"""Entries of the largest table that is built: 512 MB."""


@dataclass(frozen=True)
class Table:
    """A term of the sum: `values[i, j]` where the first variable of `scope` has its value i, the
    second j. An infinite entry forbids the combination."""

    scope: tuple[int, ...]
    values: Array


class TooLarge(Exception):
    """The variables depend on each other too much for tables of this size."""


def minimize(
    sizes: Sequence[int], tables: Iterable[Table], order: Iterable[int] | None = None
) -> tuple[float, list[int]]:
    """The least sum and a value for each variable, of which there are as many as `sizes` says.

    A variable may stand twice in a scope: then only the diagonal counts. Infinite where nothing is
    allowed. `order` is that of elimination, by default one that keeps tables small. Errors:
    TooLarge where an intermediate table would have more than LIMIT entries.
    """
    return _Elimination(sizes, tables).run(order)


def exhaust(sizes: Sequence[int], tables: Iterable[Table]) -> tuple[float, list[int]]:
    """The same by trying every combination. Errors: TooLarge where there are too many."""
    count = math.prod(sizes)
    if count > LIMIT:
        raise TooLarge(f"{count} combinations of {len(sizes)} variables")
    scope = tuple(range(len(sizes)))
    total: Array = np.zeros(sizes)
    for table in tables:
        total += _broadcast(_diagonal(table), scope)
    best = np.unravel_index(int(total.argmin()), total.shape)
    return float(total.min()), [int(i) for i in best]


class _Elimination:
    def __init__(self, sizes: Sequence[int], tables: Iterable[Table]) -> None:
        self.sizes = sizes
        self.constant = 0.0
        self.tables: dict[int, Table] = {}
        self.of: dict[int, set[int]] = defaultdict(set)
        self.numbers = itertools.count()
        for table in tables:
            self._add(_diagonal(table))

    def run(self, order: Iterable[int] | None) -> tuple[float, list[int]]:
        """Eliminates all, and decides them in the opposite order."""
        if order is None:
            order, _ = elimination_order(self.sizes, [t.scope for t in self.tables.values()])
        rules = [self._eliminate(variable) for variable in order]
        values = [0] * len(self.sizes)
        for variable, scope, best in reversed(rules):
            values[variable] = int(best[tuple(values[v] for v in scope)])
        return self.constant, values

    def _add(self, table: Table) -> None:
        if not table.scope:
            self.constant += float(table.values)
            return
        key = next(self.numbers)
        self.tables[key] = table
        for variable in table.scope:
            self.of[variable].add(key)

    def _neighbours(self, variable: int) -> set[int]:
        return {v for key in self.of[variable] for v in self.tables[key].scope}

    def _eliminate(self, variable: int) -> tuple[int, tuple[int, ...], Array]:
        """Replaces the tables of a variable by the least of their sum over it; returns its scope,
        and which value of the variable that is."""
        scope = tuple(sorted(self._neighbours(variable) - {variable}))
        entries = math.prod(self.sizes[v] for v in (*scope, variable))
        if entries > LIMIT:
            raise TooLarge(f"a table of {entries} entries over {len(scope) + 1} variables")
        total = np.zeros([self.sizes[v] for v in (*scope, variable)])
        for key in self.of.pop(variable, set()):
            table = self.tables.pop(key)
            for v in table.scope:
                self.of[v].discard(key)
            total += _broadcast(table, (*scope, variable))
        best = total.argmin(axis=-1)
        self._add(Table(scope, np.take_along_axis(total, best[..., None], -1)[..., 0]))
        return variable, scope, best.astype(np.int32)


def _diagonal(table: Table) -> Table:
    """The same with each variable once."""
    scope = tuple(dict.fromkeys(table.scope))
    if len(scope) == len(table.scope):
        return table
    letters = [scope.index(v) for v in table.scope]
    return Table(scope, np.einsum(table.values, letters, list(range(len(scope)))))


def _broadcast(table: Table, scope: Sequence[int]) -> Array:
    """The values with the axes of a larger scope."""
    order = [scope.index(v) for v in table.scope]
    values = np.transpose(table.values, np.argsort(order))
    shape = iter(values.shape)
    return values.reshape([next(shape) if i in order else 1 for i in range(len(scope))])
