"""Small sums of tables that depend on each other too much to be eliminated at once: some variables
keep their values while the others are solved exactly, for all of these or again and again."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import product

from onnxpar.search.elimination import Table, minimize
from onnxpar.search.orders import cutset, elimination_order

LIMIT = 1 << 24
"""Entries of the largest table while some variables keep their values."""
CASES = 64
"""Combinations of values of these that are all solved."""
ROUND = 1 << 20
"""Entries of the largest table of a round, of which there may be many."""
PATIENCE = 12
"""Rounds without a gain after which it is enough."""


def minimize_in_parts(
    sizes: Sequence[int], tables: Sequence[Table], start: Mapping[int, int]
) -> tuple[float, list[int], bool]:
    """A small sum, the values, and whether it is the least. `start` has values for some variables
    that some values of the others go with, and few enough of those depend on each other."""
    scopes = [table.scope for table in tables]
    order, _ = elimination_order(sizes, scopes)
    kept = cutset(sizes, scopes, order, LIMIT)
    if math.prod(sizes[v] for v in kept) > CASES:
        return *_descend(sizes, tables, start), False
    cases = (
        _solve(sizes, tables, dict(zip(kept, values, strict=True)), order)
        for values in product(*(range(sizes[v]) for v in kept))
    )
    return *min(cases), True


def _descend(
    sizes: Sequence[int], tables: Sequence[Table], start: Mapping[int, int]
) -> tuple[float, list[int]]:
    """A sum that no round makes smaller, each of which keeps other variables."""
    draw = random.Random(0)
    scopes = [table.scope for table in tables]
    least, values = minimize(sizes, [_given(t, start) for t in tables])
    values = [start.get(i, value) for i, value in enumerate(values)]
    left = PATIENCE
    while left:
        order, _ = elimination_order(sizes, scopes, draw)
        kept = cutset(sizes, scopes, order, ROUND, draw)
        total, found = _solve(sizes, tables, {v: values[v] for v in kept}, order)
        left = PATIENCE if total < least * (1 - 1e-9) else left - 1
        if total < least:
            least, values = total, found
    return least, values


def _solve(
    sizes: Sequence[int], tables: Sequence[Table], kept: Mapping[int, int], order: Sequence[int]
) -> tuple[float, list[int]]:
    """The least where some variables have these values; the others are eliminated in this order."""
    total, found = minimize(sizes, [_given(t, kept) for t in tables], order)
    return total, [kept.get(i, value) for i, value in enumerate(found)]


def _given(table: Table, values: Mapping[int, int]) -> Table:
    """The table where some variables have these values."""
    index = tuple(values.get(v, slice(None)) for v in table.scope)
    return Table(tuple(v for v in table.scope if v not in values), table.values[index])
