"""Minimizes the largest of several sums of tables within a limit on memory.

Column generation (Dantzig and Wolfe, 1960): a linear program over the assignments found so far sets
prices on the sums, and on bytes at some steps. Elimination finds the best assignment (a value for
each variable) at these prices, which is added to the program, and with it a lower bound for all
assignments. Mixtures of assignments reach that bound; if no single assignment does, integer
programming looks for one, provided that the tables are small enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.search.patience import Patience
from onnxpar.search.solver.elimination import Table
from onnxpar.search.solver.limits import Limit, TooMuch, Undecided
from onnxpar.search.solver.mixed_integer import integer_program

CLOSE = 1e-9
"""A sum that is above its lower bound by at most this share counts as the least."""
RAISES = 8
"""How many prices of memory are tried to find an assignment that fits, each 4 times the one
before."""
ROUNDS_TO_FIT = 9
"""Most rounds to find an assignment that fits. A share of the prices, which shrinks from round to
round, is the same for all steps; this damping keeps prices from jumping between steps."""
ROUNDS = 30
"""Most rounds to find the best assignment."""

NEAR = 1e-3
"""A sum that is above its lower bound by at most this share is good enough."""

Minimum = Callable[[Sequence[Table]], tuple[float, list[int], float]]
"""A function from tables to (a low sum of them, the assignment that gives it, a lower bound on
every sum)."""


def minimize_within(
    sizes: Sequence[int],
    sums: Sequence[Sequence[Table]],
    limit: Limit,
    minimum: Minimum,
    patience: Patience | None = None,
    any_fit: bool = False,
    below: float = math.inf,
) -> tuple[float, list[int], float]:
    """Finds an assignment (a value for each variable) within the limit on memory, for which the
    largest of several sums is as low as possible. Returns (that sum, the assignment, a lower bound
    on the sum of every assignment within the limit).

    sizes     the number of values of each variable
    sums      the tables of each sum
    minimum   finds the least sum of some tables
    patience  the time limit
    any_fit   True to return the first assignment within the limit
    below     the number that a sum must stay below to be of use

    The sum may be slightly more than the least if there are too many variables to be sure, or if
    the time is up; it is infinite if the tables forbid every assignment, or if no sum within the
    limit can be below `below`. Errors: TooMuch if no assignment is within the limit; Undecided if
    none was found, but some may be.
    """
    patience = patience or Patience()
    columns = _Columns(sums, limit, minimum, patience, any_fit)
    if not columns.start():
        return math.inf, [0] * len(sizes), math.inf
    if columns.bound >= below:
        return math.inf, [0] * len(sizes), columns.bound
    with patience.spending():
        if columns.best is None:
            columns.find_some()
        has_mixture = columns.best is not None or columns.find_room()
        if columns.best is not None and any_fit:
            return columns.value, columns.best.values, columns.bound
        if has_mixture:
            columns.find_least(below)
            if columns.bound >= below:
                return columns.value, columns.best.values if columns.best else [], columns.bound
        if columns.value > columns.bound * (1 + NEAR) and not patience.is_out:
            seconds = patience.on_the_clock(patience.left / 2)  # another mesh may need the rest
            try:
                solution = integer_program(sizes, sums, limit, columns.steps, seconds)
            except TooMuch as error:
                raise TooMuch(error.least, columns.least_held) from None
            if solution is not None and solution[0] <= columns.value:
                return *solution, columns.bound
    if columns.best is None:
        raise Undecided(columns.least, columns.least_held)
    return columns.value, columns.best.values, min(columns.bound, columns.value)


@dataclass(frozen=True)
class _Column:
    """An assignment (the value of each variable), its sums, and the bytes that a rank has in use at
    each step."""

    values: list[int]
    sums: Array
    held: Array


@dataclass
class _Columns:
    """The assignments (a value for each variable) found so far, and the search for better
    assignments.

    sums     the tables of each sum
    limit    the limit on memory
    minimum  finds the least sum of some tables
    any_fit  True if the first assignment within the limit is enough
    found    the assignments found
    steps    the steps at which some assignment exceeds the limit
    best     the best assignment within the limit
    bound    a lower bound on the largest sum of every assignment within the limit
    least    bytes that every assignment is known to need at some step
    """

    sums: Sequence[Sequence[Table]]
    limit: Limit
    minimum: Minimum
    patience: Patience
    any_fit: bool
    least: float = 0.0
    bound: float = 0.0
    found: list[_Column] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    best: _Column | None = None

    @property
    def value(self) -> float:
        """The largest of the sums of the best assignment; infinite if there is none within the
        limit."""
        return math.inf if self.best is None else float(self.best.sums.max())

    @property
    def least_held(self) -> float:
        """The lowest peak of bytes, over the steps of a run, among the assignments found."""
        return min(float(column.held.max()) for column in self.found)

    def start(self) -> bool:
        """Adds the assignments with the least total of all sums, and with the least of each sum.
        Returns False if the tables forbid every assignment."""
        count = len(self.sums)
        total = self._add(np.ones(count), np.zeros(0))
        if total == math.inf:
            return False
        self.bound = max(self.bound, total / count)
        for prices in np.eye(count) if count > 1 else ():
            self.bound = max(self.bound, self._add(prices, np.zeros(0)))
        return True

    def find_some(self) -> None:
        """Looks for an assignment within the limit by raising the price of a byte, equally at all
        steps."""
        first = self.found[0]
        price = float(first.sums.max()) / float(first.held.sum())
        every = np.full(self.limit.steps, price)
        for power in range(RAISES):
            self._find(np.ones(len(self.sums)), every * 4.0**power)
            is_stuck = self.found[-1].values == self.found[-2].values
            if self.best is not None or is_stuck or self.patience.is_out:
                return

    def find_room(self) -> bool:
        """Looks for an assignment within the limit by minimizing the peak of bytes. Returns True if
        an assignment, or at least a mixture of some, is within the limit. Errors: TooMuch if none
        can be."""
        least = math.inf
        for number in range(ROUNDS_TO_FIT):
            mixture = self._mix(for_room=True)
            least = mixture.value
            even = 0.5 ** (1 + number / 3)
            prices = np.full(self.limit.steps, even / self.limit.steps)
            prices[self.steps] += (1 - even) * mixture.first / mixture.first.sum()
            bound = self._find(np.zeros(len(self.sums)), prices)
            self.least = max(self.least, bound)
            is_over = self.least > self.limit.bytes * (1 + CLOSE)
            if self.best is not None or least <= bound * (1 + CLOSE) or self.patience.is_out:
                break
            if is_over and self.any_fit:
                break
        if is_over:
            raise TooMuch(self.least, self.least_held)
        return least <= self.limit.bytes or self.best is not None

    def find_least(self, below: float) -> None:
        """Looks for the best assignment within the limit, and raises the lower bound, until no sum
        can be below `below`, or none better."""
        for _ in range(ROUNDS):
            mixture = self._mix(for_room=False)
            price = mixture.second.sum() * self.limit.bytes
            self.bound = max(self.bound, self._add(mixture.first, mixture.second) - price)
            is_near = self.value <= self.bound * (1 + NEAR)
            if is_near or mixture.value <= self.bound + CLOSE * abs(self.bound):
                break
            if self.bound >= below or self.patience.is_out:
                break

    def _mix(self, for_room: bool) -> _Mixture:
        """Returns the best weighted mean of the assignments found: if `for_room`, the one with the
        lowest peak of memory; else the one whose largest sum is least, of all within the memory
        limit."""
        sums = np.stack([column.sums for column in self.found], axis=1)
        held = np.stack([column.held for column in self.found], axis=1)
        while True:
            at = held[self.steps]
            mixture = (
                _mixture(at, at[:0], math.inf) if for_room else _mixture(sums, at, self.limit.bytes)
            )
            mixed = held @ mixture.weights
            worst = int(mixed.argmax())
            most = mixture.value if for_room else self.limit.bytes
            if worst in self.steps or mixed[worst] <= most * (1 + CLOSE):
                return mixture
            self.steps.append(worst)

    def _add(self, of_sums: Array, of_steps: Array) -> float:
        """Finds and adds the best assignment at these prices of the sums, and of a byte at each of
        `steps`. Returns a lower bound on the cost of all assignments at these prices."""
        prices = np.zeros(self.limit.steps)
        prices[self.steps[: len(of_steps)]] = of_steps
        return self._find(of_sums, prices)

    def _find(self, of_sums: Array, prices: Array) -> float:
        """Does what `_add` does, with a price of a byte at every step of the run."""
        tables = [
            scaled
            for tables, price in zip(self.sums, of_sums, strict=True)
            for scaled in _scaled(tables, price)
        ]
        value, values, bound = self.minimum([*tables, *self.limit.priced(prices)])
        if math.isinf(value):
            return value
        sums = np.array([sum(table.at(values) for table in tables) for tables in self.sums])
        column = _Column(values, sums, self.limit.held(values))
        self.found.append(column)
        worst = int(column.held.argmax())
        if column.held[worst] > self.limit.bytes:
            if worst not in self.steps:
                self.steps.append(worst)
        elif sums.max() < self.value:
            self.best = column
        return bound


@dataclass(frozen=True)
class _Mixture:
    """A weighted mean of columns, as `_mixture` finds it.

    value          the largest row of the first matrix, in this mean
    weights        the weight of each column
    first, second  the prices of the rows of both matrices (the dual values)
    """

    value: float
    weights: Array
    first: Array
    second: Array


def _mixture(first: Array, second: Array, most: float) -> _Mixture:
    """Returns the weighted mean of columns for which the largest row of `first` is least, while
    every row of `second` is at most `most`."""
    from scipy.optimize import linprog  # takes half a second to import

    count = first.shape[1]
    scale = float(first.max()) or 1.0
    above = np.concatenate((first / scale, second / most))
    slack = np.concatenate((-np.ones(len(first)), np.zeros(len(second))))
    solved = linprog(
        np.concatenate((np.zeros(count), [1.0])),
        np.column_stack((above, slack)),
        np.concatenate((np.zeros(len(first)), np.ones(len(second)))),
        np.concatenate((np.ones(count), [0.0]))[None],
        [1.0],
        [(0, None)] * count + [(None, None)],
    )
    assert solved.status == 0, solved.message
    prices = np.maximum(-solved.ineqlin.marginals, 0.0)
    return _Mixture(
        float(solved.fun) * scale,
        solved.x[:-1],
        prices[: len(first)],
        prices[len(first) :] * (scale / most),
    )


def _scaled(tables: Sequence[Table], price: float) -> list[Table]:
    """Returns the tables multiplied by a price; forbidden entries stay infinite."""
    if price == 1.0:
        return list(tables)
    allowed = [np.where(np.isinf(t.values), 0.0, t.values) for t in tables]
    return [
        Table(t.scope, np.where(np.isinf(t.values), np.inf, price * values))
        for t, values in zip(tables, allowed, strict=True)
    ]
