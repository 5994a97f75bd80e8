"""A small sum of tables where the least is out of reach: some variables keep their values while the
others are solved exactly, again and again with others."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence

from onnxpar.search.elimination import Table, minimize

LIMIT = 1 << 22
"""Entries that the largest table of a round should have at most; in another order it has more."""
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
        kept = {v: values[v] for v in cutset(sizes, tables, draw)}
        total, found = minimize(sizes, [_given(t, kept) for t in tables])
        left = PATIENCE if total < least * (1 - 1e-9) else left - 1
        if total < least:
            least, values = total, [kept.get(i, value) for i, value in enumerate(found)]
    return least, values


def cutset(sizes: Sequence[int], tables: Sequence[Table], draw: random.Random) -> set[int]:
    """Variables without which all others can be eliminated; which ones is up to chance."""
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for table in tables:
        for v in table.scope:
            near[v] |= set(table.scope) - {v}
    kept: set[int] = set()
    while near:
        entries = {v: _entries(v, near[v], sizes) for v in near}
        variable = min(near, key=lambda v: entries[v])
        if entries[variable] > LIMIT:
            variable = max(near, key=lambda v: len(near[v]) * sizes[v] * draw.random())
            kept.add(variable)
            _remove(variable, near, join=False)
        else:
            _remove(variable, near, join=True)
    return kept


def _entries(variable: int, near: Collection[int], sizes: Sequence[int]) -> int:
    return math.prod(sizes[v] for v in near) * sizes[variable]


def _remove(variable: int, near: dict[int, set[int]], join: bool) -> None:
    """Takes a variable out of the graph; what it stood between is joined if it is eliminated."""
    around = near.pop(variable)
    for v in around:
        near[v].discard(variable)
        if join:
            near[v] |= around - {v}


def _given(table: Table, values: Mapping[int, int]) -> Table:
    """The table where some variables have these values."""
    index = tuple(values.get(v, slice(None)) for v in table.scope)
    return Table(tuple(v for v in table.scope if v not in values), table.values[index])
