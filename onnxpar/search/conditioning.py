"""Small sums of tables that depend on each other too much to be eliminated at once: some variables
keep their values while the others are solved exactly, for all of these or again and again."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import product

from onnxpar.search.elimination import Table, minimize

LIMIT = 1 << 24
"""Entries of the largest table while some variables keep their values."""
CASES = 64
"""Combinations of values of these that are all solved."""
DRAWS = 12
"""Sets of such variables that are drawn to find a small one."""
PATIENCE = 20
"""Rounds without a gain after which it is enough."""


def minimize_in_parts(
    sizes: Sequence[int], tables: Sequence[Table], start: Mapping[int, int]
) -> tuple[float, list[int], bool]:
    """A small sum, the values, and whether it is the least. `start` has values for some variables
    that some values of the others go with, and few enough of those depend on each other."""
    draw = random.Random(0)
    sets = [cutset(sizes, tables, draw) for _ in range(DRAWS)]
    kept, order = min(sets, key=lambda found: math.prod(sizes[v] for v in found[0]))
    if math.prod(sizes[v] for v in kept) > CASES:
        return *_descend(sizes, tables, start, draw), False
    cases = (
        _solve(sizes, tables, dict(zip(kept, values, strict=True)), order)
        for values in product(*(range(sizes[v]) for v in kept))
    )
    return *min(cases), True


def _descend(
    sizes: Sequence[int], tables: Sequence[Table], start: Mapping[int, int], draw: random.Random
) -> tuple[float, list[int]]:
    """A sum that no round makes smaller, each of which keeps other variables."""
    least, values = minimize(sizes, [_given(t, start) for t in tables])
    values = [start.get(i, value) for i, value in enumerate(values)]
    left = PATIENCE
    while left:
        kept, order = cutset(sizes, tables, draw)
        total, found = _solve(sizes, tables, {v: values[v] for v in kept}, order)
        left = PATIENCE if total < least * (1 - 1e-9) else left - 1
        if total < least:
            least, values = total, found
    return least, values


def _solve(
    sizes: Sequence[int], tables: Sequence[Table], kept: Mapping[int, int], order: Sequence[int]
) -> tuple[float, list[int]]:
    """The least where some variables have these values; the others are eliminated in this order."""
    total, found = minimize(sizes, [_given(t, kept) for t in tables], [*order, *kept])
    return total, [kept.get(i, value) for i, value in enumerate(found)]


def cutset(
    sizes: Sequence[int], tables: Sequence[Table], draw: random.Random
) -> tuple[list[int], list[int]]:
    """Variables without which all others can be eliminated, and the order of those; which ones is
    up to chance."""
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for table in tables:
        for v in table.scope:
            near[v] |= set(table.scope) - {v}
    bits = [math.log2(size) for size in sizes]
    entries = {v: bits[v] + sum(bits[u] for u in near[v]) for v in near}
    chance = {v: draw.random() for v in near}
    kept: list[int] = []
    order: list[int] = []
    while near:
        variable = min(near, key=lambda v: entries[v] + chance[v])
        is_kept = entries[variable] > math.log2(LIMIT)
        if is_kept:
            clique = near[variable] | {variable}
            variable = max(clique, key=lambda v: len(near[v]) * draw.random())
        (kept if is_kept else order).append(variable)
        around = near.pop(variable)
        for v in around:
            near[v].discard(variable)
            if not is_kept:
                near[v] |= around - {v}
            entries[v] = bits[v] + sum(bits[u] for u in near[v])
    return kept, order


def _given(table: Table, values: Mapping[int, int]) -> Table:
    """The table where some variables have these values."""
    index = tuple(values.get(v, slice(None)) for v in table.scope)
    return Table(tuple(v for v in table.scope if v not in values), table.values[index])
