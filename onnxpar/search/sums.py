"""The variables of a search and the tables over them, counted before any table is made: a search
that would take too much memory is made smaller first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from onnxpar.base.arrays import Array
from onnxpar.search.reshard_costs import ShardingDomain, table_of
from onnxpar.search.solver.elimination import Table


class Sums:
    """Sums of tables over shared variables.

    sizes    how many values each variable has
    entries  entries of all tables of one sum, whether they are made or not
    tables   the tables of each sum, once they are made
    """

    def __init__(self, count: int) -> None:
        self.sizes: list[int] = []
        self.entries = 0
        self.tables: list[list[Table]] = [[] for _ in range(count)]
        self._jobs: deque[Callable[[], None]] = deque()

    def add_variable(self, size: int) -> int:
        """The number of a new variable with so many values."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def add(self, ends: Sequence[ShardingDomain], rows: Callable[[], Array]) -> None:
        """A table for each sum, with an axis for each end; an end of no variable has one entry.
        `rows` makes their values."""
        self.entries += math.prod(self.sizes[e.variable] for e in ends if e.variable is not None)

        def make() -> None:
            for tables, values in zip(self.tables, rows(), strict=True):
                tables.append(table_of(ends, values))

        self.later(make)

    def forbid(self, ends: Sequence[ShardingDomain], values: Callable[[], Array]) -> None:
        """A table of the first sum alone, of zeros and of infinite entries."""
        self.entries += math.prod(self.sizes[e.variable] for e in ends if e.variable is not None)
        self.later(lambda: self.tables[0].append(table_of(ends, values())))

    def later(self, job: Callable[[], None]) -> None:
        """Runs something when the tables are made."""
        self._jobs.append(job)

    def make(self) -> None:
        """Makes the tables, in the order in which they were added."""
        while self._jobs:
            self._jobs.popleft()()
