"""The variables of a search, and the tables over them. Entries are counted before any table is
computed, so that a search that would need too much memory can be made smaller first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from onnxpar.base.arrays import Array
from onnxpar.search.reshard_costs import ShardingDomain, table_of
from onnxpar.search.solver.elimination import Table


class Sums:
    """Sums of tables over shared variables, whose tables are computed late.

    sizes    the number of values of each variable
    entries  the number of entries of all tables of one sum, computed or not
    tables   the list of tables of each sum; empty until `make`
    """

    def __init__(self, count: int) -> None:
        self.sizes: list[int] = []
        self.entries = 0
        self.tables: list[list[Table]] = [[] for _ in range(count)]
        self._jobs: deque[Callable[[], None]] = deque()

    def add_variable(self, size: int) -> int:
        """Adds a variable with `size` values; returns the variable's number."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def add(self, domains: Sequence[ShardingDomain], rows: Callable[[], Array]) -> None:
        """Adds a table to each sum. `rows` computes its values, one array for each sum; an array
        has an axis for each domain, of length 1 for a domain without a variable."""
        self._count(domains)

        def make() -> None:
            for tables, values in zip(self.tables, rows(), strict=True):
                tables.append(table_of(domains, values))

        self.later(make)

    def forbid(self, domains: Sequence[ShardingDomain], values: Callable[[], Array]) -> None:
        """Adds a table to the first sum that forbids combinations: `values` are infinite there, and
        zero elsewhere."""
        self._count(domains)
        self.later(lambda: self.tables[0].append(table_of(domains, values())))

    def _count(self, domains: Sequence[ShardingDomain]) -> None:
        """Counts the entries of a table over these domains."""
        self.entries += math.prod(self.sizes[d.variable] for d in domains if d.variable is not None)

    def later(self, job: Callable[[], None]) -> None:
        """Adds a job that `make` runs, after the jobs and tables that were added before it."""
        self._jobs.append(job)

    def make(self) -> None:
        """Computes the tables and runs the jobs, in the order in which they were added."""
        while self._jobs:
            self._jobs.popleft()()
