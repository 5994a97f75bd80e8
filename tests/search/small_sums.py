"""Random sums of tables that are small enough to try every assignment."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import strategies as st

from onnxpar.base.arrays import Array
from onnxpar.search.solver.elimination import Table

Sum = tuple[list[int], list[Table]]
"""How many values each variable has, and the tables."""


@st.composite
def sums(draw: st.DrawFn, tables: int = 8) -> Sum:
    """Up to six variables and so many tables, with equal and infinite entries and diagonals."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = []
    for _ in range(draw(st.integers(0, tables))):
        scope = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=3))
        values = random.integers(0, 9, [sizes[v] for v in scope]).astype(float)
        values[random.random(values.shape) < draw(st.sampled_from([0, 0.3]))] = np.inf
        found.append(Table(tuple(scope), values))
    return sizes, found


def total(tables: Iterable[Table], values: Sequence[int]) -> float:
    """The sum for an assignment."""
    return sum(float(t.values[tuple(values[v] for v in t.scope)]) for t in tables)


def every_total(sizes: Sequence[int], tables: Iterable[Table]) -> Array:
    """The sum for each assignment, one after the other."""
    listed = list(tables)
    found = [total(listed, values) for values in itertools.product(*map(range, sizes))]
    return np.array(found).reshape(tuple(sizes))
