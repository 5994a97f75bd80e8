"""In which order to eliminate variables, so that tables stay small: greedy orders, some drawn at
random, as the smallest is hard to find."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence

EASY = 1 << 20
"""Entries of a largest table that is small enough."""
WORK = 40_000
"""Variables that are put in order in all, where the first order is not: so many are drawn."""


def elimination_order(
    sizes: Sequence[int], scopes: Iterable[Sequence[int]], draw: random.Random | None = None
) -> tuple[list[int], float]:
    """An order of all variables, and the entries of the largest table that it makes: one that is
    drawn, or the best of many."""
    near = _graph(len(sizes), scopes)
    bits = [math.log2(size) for size in sizes]
    if draw is not None:
        order, most = _greedy(bits, near, 1.0, draw)
        return order, 2.0**most
    draw = random.Random(0)
    order, most = _greedy(bits, near, 0.0, draw)
    for _ in range(min(40, WORK // len(sizes))):
        if most <= math.log2(EASY):
            break
        other, larger = _greedy(bits, near, 1.0, draw)
        if larger < most:
            order, most = other, larger
    return order, 2.0**most


def cutset(
    sizes: Sequence[int],
    scopes: Iterable[Sequence[int]],
    order: Sequence[int],
    limit: int,
    draw: random.Random | None = None,
) -> list[int]:
    """Variables without which eliminating the others in this order makes no table of more than
    `limit` entries: again and again the one that is in the most of those, or one that is drawn
    among them."""
    near = _graph(len(sizes), scopes)
    bits = [math.log2(size) for size in sizes]
    kept: list[int] = []
    while True:
        counts: Counter[int] = Counter()
        graph = {v: near[v].difference(kept) for v in near if v not in kept}
        for variable in order:
            if variable in graph:
                around = _eliminate(graph, variable)
                if bits[variable] + sum(bits[u] for u in around) > math.log2(limit):
                    counts.update((variable, *around))
        if not counts:
            return kept
        weight = {v: counts[v] * bits[v] * (draw.random() if draw else 1) for v in counts}
        kept.append(max(weight, key=lambda v: (weight[v], v)))


def _eliminate(graph: dict[int, set[int]], variable: int) -> set[int]:
    """Takes a variable out, joins those that it stood beside, and returns them."""
    around = graph.pop(variable)
    for v in around:
        graph[v] |= around - {v}
        graph[v].discard(variable)
    return around


def _graph(count: int, scopes: Iterable[Sequence[int]]) -> dict[int, set[int]]:
    """The variables that stand in a table with each."""
    near: dict[int, set[int]] = {v: set() for v in range(count)}
    for scope in scopes:
        for v in scope:
            near[v] |= set(scope) - {v}
    return near


def _greedy(
    bits: Sequence[float], near: dict[int, set[int]], chance: float, draw: random.Random
) -> tuple[list[int], float]:
    """Always the variable with the smallest table, and that joins the fewest others; `chance` is
    how far both may be off, in bits. Returns the bits of the largest table, too."""
    graph = {v: set(others) for v, others in near.items()}

    def weight(v: int) -> float:
        around = graph[v]
        own = bits[v] + sum(bits[u] for u in around)
        joined = sum(bits[a] * bits[b] for a in around for b in around - graph[a] if a < b)
        return own + 0.5 * math.log2(1 + joined) + chance * draw.random()

    weights = {v: weight(v) for v in graph}
    order, most = [], 0.0
    while graph:
        variable = min(graph, key=weights.__getitem__)
        around = _eliminate(graph, variable)
        order.append(variable)
        most = max(most, bits[variable] + sum(bits[u] for u in around))
        for v in around.union(*(graph[v] for v in around)):
            weights[v] = weight(v)
    return order, most
