"""In which order to eliminate variables, so that tables stay small: greedy orders, some drawn at
random, as the smallest is hard to find."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

EASY = 1 << 20
"""Entries of a largest table that is small enough."""
TRIES = 40
"""Orders that are drawn where the first is not."""


def elimination_order(
    sizes: Sequence[int], scopes: Iterable[Sequence[int]], seed: int = 0
) -> tuple[list[int], float]:
    """An order of all variables, and the entries of the largest table that it makes."""
    draw = random.Random(seed)
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for scope in scopes:
        for v in scope:
            near[v] |= set(scope) - {v}
    bits = [math.log2(size) for size in sizes]
    order, most = _greedy(bits, near, 0.0, draw)
    for _ in range(TRIES):
        if most <= math.log2(EASY):
            break
        other, larger = _greedy(bits, near, 1.0, draw)
        if larger < most:
            order, most = other, larger
    return order, 2.0**most


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
        around = graph.pop(variable)
        order.append(variable)
        most = max(most, bits[variable] + sum(bits[u] for u in around))
        for v in around:
            graph[v] |= around - {v}
            graph[v].discard(variable)
        for v in around.union(*(graph[v] for v in around)):
            weights[v] = weight(v)
    return order, most
