"""The limit on memory: the bytes that a rank holds at each step of a run are sums of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.search.solver.elimination import Table, every_sum


@dataclass(frozen=True)
class Demand:
    """Bytes, the entries of a table, that a rank holds during `spans`: rows of a first and a last
    step. A step in several spans counts several times."""

    table: Table
    spans: Array

    def weight(self, prices: Array) -> float:
        """The sum of prices over all steps of all spans; `prices` has one for each step."""
        before = np.concatenate(([0.0], np.cumsum(prices)))
        return float((before[self.spans[:, 1] + 1] - before[self.spans[:, 0]]).sum())


@dataclass(frozen=True)
class Limit:
    """The most bytes that a rank may hold at each step of a run."""

    bytes: float
    steps: int
    demands: Sequence[Demand]

    def held(self, values: Sequence[int]) -> Array:
        """Bytes that a rank holds at each step, given a value for each variable."""
        change = np.zeros(self.steps + 1)
        for demand in self.demands:
            size = demand.table.at(values)
            np.add.at(change, demand.spans[:, 0], size)
            np.add.at(change, demand.spans[:, 1] + 1, -size)
        return np.cumsum(change[:-1])

    def priced(self, prices: Array) -> list[Table]:
        """Tables of the cost of the held bytes, given the price of a byte at each step."""
        priced = ((demand.table, demand.weight(prices)) for demand in self.demands)
        return [Table(t.scope, t.values * weight) for t, weight in priced if weight]


class TooMuch(Exception):
    """Every assignment needs at least `least` bytes at some step, more than the limit; the best one
    that was found needs `found` bytes."""

    def __init__(self, least: float, found: float) -> None:
        super().__init__(f"at least {least:.0f} bytes, {found:.0f} found")
        self.least, self.found = least, found


class Undecided(Exception):
    """No assignment within the limit was found, nor a proof that there is none. Every assignment
    needs at least `least` bytes at some step; the best one that was found needs `found` bytes."""

    def __init__(self, least: float, found: float) -> None:
        super().__init__(f"at least {least:.0f} bytes, {found:.0f} found")
        self.least, self.found = least, found


def exhaust_within(
    sizes: Sequence[int], sums: Sequence[Sequence[Table]], limit: Limit
) -> tuple[float, list[int]]:
    """Minimizes the largest of the sums within the limit, by trying every assignment (a value for
    each variable); returns that sum and the assignment. Errors: TooLarge, TooMuch."""
    largest = every_sum(sizes, sums[0])
    for tables in sums[1:]:
        np.maximum(largest, every_sum(sizes, tables), out=largest)
    peak: Array = np.zeros_like(largest)
    for step in range(limit.steps if limit.demands else 0):
        np.maximum(peak, every_sum(sizes, limit.priced(np.eye(limit.steps)[step])), out=peak)
    peak[np.isinf(largest)] = np.inf
    if np.isfinite(largest).any() and peak.min() > limit.bytes:
        raise TooMuch(float(peak.min()), float(peak.min()))
    largest[peak > limit.bytes] = np.inf
    best = np.unravel_index(int(largest.argmin()), largest.shape)
    return float(largest.min()), [int(i) for i in best]
