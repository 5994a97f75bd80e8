"""The limit on memory: the bytes that a rank has in use at each step of a run are sums of
tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.search.solver.elimination import Table, every_sum


@dataclass(frozen=True)
class Demand:
    """Bytes that a rank has in use during some steps of a run.

    table  the bytes, as a function of variables
    spans  rows of (first step, last step); a step in several spans counts several times
    """

    table: Table
    spans: Array

    def weight(self, prices: Array) -> float:
        """Returns the sum of prices over all steps of all spans; `prices` has one for each step."""
        before = np.concatenate(([0.0], np.cumsum(prices)))
        return float((before[self.spans[:, 1] + 1] - before[self.spans[:, 0]]).sum())


@dataclass(frozen=True)
class Limit:
    """The most bytes that a rank may have in use at each step of a run.

    bytes    the limit
    steps    the number of steps
    demands  the bytes in use are the sum of these
    """

    bytes: float
    steps: int
    demands: Sequence[Demand]

    def held(self, values: Sequence[int]) -> Array:
        """Returns the bytes that a rank has in use at each step, for these values of the
        variables."""
        change = np.zeros(self.steps + 1)
        for demand in self.demands:
            size = demand.table.at(values)
            np.add.at(change, demand.spans[:, 0], size)
            np.add.at(change, demand.spans[:, 1] + 1, -size)
        return np.cumsum(change[:-1])

    def priced(self, prices: Array) -> list[Table]:
        """Returns tables of the cost of the bytes in use, for the price of a byte at each step."""
        priced = ((demand.table, demand.weight(prices)) for demand in self.demands)
        return [Table(t.scope, t.values * weight) for t, weight in priced if weight]


class TooMuch(Exception):
    """Every assignment (a value for each variable) needs at least `least` bytes at some step, more
    than the limit; the best one that was found needs `found` bytes."""

    def __init__(self, least: float, found: float) -> None:
        super().__init__(f"at least {least:.0f} bytes, {found:.0f} found")
        self.least, self.found = least, found


class Undecided(Exception):
    """No assignment (a value for each variable) within the limit was found, nor a proof that there
    is none. Every assignment needs at least `least` bytes at some step; the best one that was found
    needs `found` bytes."""

    def __init__(self, least: float, found: float) -> None:
        super().__init__(f"at least {least:.0f} bytes, {found:.0f} found")
        self.least, self.found = least, found


def exhaust_within(
    sizes: Sequence[int], sums: Sequence[Sequence[Table]], limit: Limit
) -> tuple[float, list[int]]:
    """Minimizes the largest of the sums within the limit, by trying every assignment (a value for
    each variable); returns (that sum, the assignment). Errors: TooLarge if there are too many
    assignments; TooMuch if none is within the limit."""
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
