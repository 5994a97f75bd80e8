"""The variables of a search and the tables over them. Entries are counted before any table is
built, so that a search that would need too much memory can be reduced first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from onnxpar.base.arrays import Array
from onnxpar.search.reshard_costs import ShardingDomain, table_of
from onnxpar.search.solver.elimination import Table


class Sums:
    """Sums of tables over shared variables.

    sizes    the number of values of each variable
    entries  entries of all tables of one sum, built or not
    tables   the tables of each sum, once they are built
    """

    def __init__(self, count: int) -> None:
        self.sizes: list[int] = []
        self.entries = 0
        self.tables: list[list[Table]] = [[] for _ in range(count)]
        self._jobs: deque[Callable[[], None]] = deque()

    def add_variable(self, size: int) -> int:
        """Adds a variable with `size` values; returns its number."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def add(self, domains: Sequence[ShardingDomain], rows: Callable[[], Array]) -> None:
        """Adds a table to each sum, with an axis for each domain, of length 1 for one without a
        variable; `rows` computes their values."""
        self._count(domains)

        def make() -> None:
            for tables, values in zip(self.tables, rows(), strict=True):
                tables.append(table_of(domains, values))

        self.later(make)

    def forbid(self, domains: Sequence[ShardingDomain], values: Callable[[], Array]) -> None:
        """Adds a table of zeros and infinite entries to the first sum only."""
        self._count(domains)
        self.later(lambda: self.tables[0].append(table_of(domains, values())))

    def _count(self, domains: Sequence[ShardingDomain]) -> None:
        self.entries += math.prod(self.sizes[d.variable] for d in domains if d.variable is not None)

    def later(self, job: Callable[[], None]) -> None:
        """Adds a job that runs when the tables are built."""
        self._jobs.append(job)

    def make(self) -> None:
        """Builds the tables, in the order in which they were added."""
        while self._jobs:
            self._jobs.popleft()()
