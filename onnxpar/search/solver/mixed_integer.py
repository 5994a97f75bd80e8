"""Minimizes the largest of several sums of tables within a limit on memory, by mixed-integer
programming (HiGHS); for small tables."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from onnxpar.base.arrays import Array
from onnxpar.search.solver.elimination import Table, diagonal
from onnxpar.search.solver.limits import Limit, TooMuch

MOST_ENTRIES = 60_000
"""Most entries of all tables together for which the program is tried."""
MOST_SECONDS = 60.0
"""The longest time limit, in seconds; the best assignment found by then counts."""
INFEASIBLE = 2
"""SciPy's status of an infeasible program."""
UNIT = 1e4
"""Sums and the limit are scaled to about this number, because HiGHS has absolute tolerances."""


def integer_program(
    sizes: Sequence[int],
    sums: Sequence[Sequence[Table]],
    limit: Limit,
    steps: Iterable[int],
    seconds: float = MOST_SECONDS,
) -> tuple[float, list[int]] | None:
    """Finds the assignment (a value for each variable) within the limit whose largest sum is least.
    Returns (that sum, the assignment); None if none was found within `seconds`, or if the tables
    are too large.

    sizes  the number of values of each variable
    sums   the tables of each sum
    steps  the steps at which memory is likely to exceed the limit

    Errors: TooMuch if no assignment is within the limit.
    """
    sums = [[diagonal(table) for table in tables] for tables in sums]
    demands = [diagonal(demand.table) for demand in limit.demands]
    entries = {t.scope: t.values.size for t in (*itertools.chain(*sums), *demands)}
    if sum(entries.values()) > MOST_ENTRIES:
        return None
    program = _Program(sizes, sums, demands, limit)
    steps = list(steps)
    end = time.monotonic() + min(seconds, MOST_SECONDS)
    while True:
        values = program.solve(steps, max(end - time.monotonic(), 0.1))
        if values is None:
            return None
        held = limit.held(values)
        worst = int(held.argmax())
        if held[worst] <= limit.bytes:
            return program.value(values), values
        if worst in steps:
            return None
        steps.append(worst)


class _Program:
    """The mixed-integer program. It has a column for each value of each variable, one for each
    entry of each scope of several variables, and one for the largest sum."""

    def __init__(
        self,
        sizes: Sequence[int],
        sums: Sequence[Sequence[Table]],
        demands: Sequence[Table],
        limit: Limit,
    ) -> None:
        self.sizes, self.sums, self.demands = sizes, sums, demands
        self.limit = limit
        self.first = np.concatenate(([0], np.cumsum(sizes))).astype(int)
        self.count = int(self.first[-1])
        self.columns: dict[tuple[int, ...], Array] = {}
        tables = [*itertools.chain(*sums), *demands]
        for scope in dict.fromkeys(table.scope for table in tables):
            if len(scope) == 1:
                self.columns[scope] = np.arange(*self.first[[scope[0], scope[0] + 1]])
            else:
                shape = [sizes[v] for v in scope]
                self.columns[scope] = self.count + np.arange(math.prod(shape)).reshape(shape)
                self.count += math.prod(shape)
        self.most = np.ones(self.count + 1)
        self.most[-1] = np.inf
        for table in tables:
            self.most[self.columns[table.scope][np.isinf(table.values)]] = 0

    def solve(self, steps: Iterable[int], seconds: float) -> list[int] | None:
        """Returns the best assignment that keeps the limit at these steps; None if none was found
        within `seconds`. Errors: TooMuch if there is none."""
        from scipy.optimize import Bounds, milp  # takes half a second to import

        largest = np.zeros(self.count + 1)
        largest[-1] = 1
        whole = np.zeros(self.count + 1)
        whole[: self.first[-1]] = 1
        solved = milp(
            largest,
            integrality=whole,
            bounds=Bounds(0, self.most),
            constraints=self._stacked([*self._one_value_each(), *self._sums(), *self._held(steps)]),
            # with presolve, HiGHS 1.12 prints a line to stdout
            options={"time_limit": seconds, "mip_rel_gap": 0.0, "presolve": False},
        )
        if solved.status == INFEASIBLE:
            raise TooMuch(self.limit.bytes, math.inf)
        if solved.x is None:
            return None
        ends = itertools.pairwise(self.first)
        return [int(np.argmax(solved.x[start:end])) for start, end in ends]

    def value(self, values: Sequence[int]) -> float:
        """Returns the largest of the sums for one assignment, which is what the program
        minimizes."""
        return max(sum(table.at(values) for table in tables) for tables in self.sums)

    def _one_value_each(self) -> Iterator[_Row]:
        """Yields constraints: each variable has exactly one value, which determines the entries of
        the scopes that have the variable."""
        for start, end in itertools.pairwise(self.first):
            yield _Row.of([(np.arange(start, end), np.ones(end - start))], 1, 1)
        for scope, columns in self.columns.items():
            if not scope:
                yield _Row.of([(columns.reshape(1), np.ones(1))], 1, 1)
            for axis, variable in enumerate(scope if len(scope) > 1 else ()):
                for value in range(self.sizes[variable]):
                    entries = np.take(columns, value, axis).reshape(-1)
                    own = np.array([self.first[variable] + value])
                    yield _Row.of([(entries, np.ones(len(entries))), (own, -np.ones(1))], 0, 0)

    def _sums(self) -> Iterator[_Row]:
        """Yields constraints: the last column is at least each sum, scaled by the largest entry."""
        scale = UNIT / max(self._typical(), 1e-300)
        for tables in self.sums:
            terms = [
                (self.columns[t.scope], np.where(np.isinf(t.values), 0, t.values) * scale)
                for t in tables
            ]
            result = np.array([self.count]), -np.ones(1)
            yield _Row.of([*terms, result], -np.inf, 0)

    def _typical(self) -> float:
        """Returns the largest finite entry in the tables of all sums."""
        finite = [t.values[np.isfinite(t.values)] for tables in self.sums for t in tables]
        return max((float(values.max()) for values in finite if values.size), default=1.0)

    def _held(self, steps: Iterable[int]) -> Iterator[_Row]:
        """Yields constraints: at each of these steps, a rank has no more bytes in use than the
        limit."""
        scale = UNIT / self.limit.bytes
        for step in steps:
            at = np.zeros(self.limit.steps)
            at[step] = scale
            weights = [demand.weight(at) for demand in self.limit.demands]
            terms = [
                (self.columns[table.scope], table.values * weight)
                for table, weight in zip(self.demands, weights, strict=True)
            ]
            yield _Row.of(terms, -np.inf, UNIT)

    def _stacked(self, rows: Sequence[_Row]) -> tuple[Any, list[float], list[float]]:
        """Returns the constraints as SciPy takes them: (matrix, lower bounds, upper bounds)."""
        shape = (len(rows), self.count + 1)
        numbers = np.repeat(np.arange(len(rows)), [len(row.columns) for row in rows])
        columns = np.concatenate([row.columns for row in rows])
        weights = np.concatenate([row.weights for row in rows])
        matrix = csr_array((weights, (numbers, columns)), shape=shape)
        return matrix, [row.least for row in rows], [row.most for row in rows]


@dataclass(frozen=True)
class _Row:
    """A constraint: bounds of a weighted sum of columns of the program; a column that is listed
    twice counts twice."""

    columns: Array
    weights: Array
    least: float
    most: float

    @classmethod
    def of(cls, terms: Iterable[tuple[Array, Array]], least: float, most: float) -> _Row:
        """Returns the constraint on terms (columns, weights), each a pair of arrays of one
        shape."""
        columns, weights = zip(*((c.reshape(-1), w.reshape(-1)) for c, w in terms), strict=True)
        return cls(np.concatenate(columns), np.concatenate(weights), least, most)
