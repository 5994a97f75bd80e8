"""A small sum of tables where the least is out of reach: some variables keep their values while the
others are solved exactly, again and again with others."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence

from onnxpar.search.elimination import Table, minimize

LIMIT = 1 << 22
"""Entries of the largest table of a round."""
PATIENCE = 20
"""Rounds without a gain after which it is enough."""


def descend(
    sizes: Sequence[int], tables: Sequence[Table], start: Mapping[int, int], seed: int = 0
) -> tuple[float, list[int]]:
    """A sum that no round makes smaller, and the values. `start` has values for some variables that
    some values of the others go with, and few enough of those depend on each other."""
    draw = random.Random(seed)
    least, values = minimize(sizes, [_given(t, start) for t in tables])
    values = [start.get(i, value) for i, value in enumerate(values)]
    left = PATIENCE
    while left:
        fixed, order = cutset(sizes, tables, draw)
        kept = {v: values[v] for v in fixed}
        total, found = minimize(sizes, [_given(t, kept) for t in tables], [*order, *fixed])
        left = PATIENCE if total < least * (1 - 1e-9) else left - 1
        if total < least:
            least, values = total, [kept.get(i, value) for i, value in enumerate(found)]
    return least, values


def cutset(
    sizes: Sequence[int], tables: Sequence[Table], draw: random.Random
) -> tuple[list[int], list[int]]:
    """Variables without which all others can be eliminated, and the order of those; which ones is
    up to chance."""
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for table in tables:
        for v in table.scope:
            near[v] |= set(table.scope) - {v}
    entries = {v: _entries(v, near[v], sizes) for v in near}
    kept: list[int] = []
    order: list[int] = []
    while near:
        variable = min(near, key=lambda v: entries[v])
        is_kept = entries[variable] > LIMIT
        if is_kept:
            variable = max(near, key=lambda v: len(near[v]) * sizes[v] * draw.random())
        (kept if is_kept else order).append(variable)
        around = near.pop(variable)
        for v in around:
            near[v].discard(variable)
            if not is_kept:
                near[v] |= around - {v}
            entries[v] = _entries(v, near[v], sizes)
    return kept, order


def _entries(variable: int, near: Collection[int], sizes: Sequence[int]) -> int:
    return math.prod(sizes[v] for v in near) * sizes[variable]


def _given(table: Table, values: Mapping[int, int]) -> Table:
    """The table where some variables have these values."""
    index = tuple(values.get(v, slice(None)) for v in table.scope)
    return Table(tuple(v for v in table.scope if v not in values), table.values[index])
