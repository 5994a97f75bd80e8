"""Sizes of shards in proportion to the shares of their ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Shares:
    """Divides elements over the ranks along axes in proportion to `weights`, in the row-major order
    of the axes. `counts` are the sizes of the axes, the major one first.

    >>> Shares((2, 2), (3.0, 3.0, 1.0, 1.0)).sizes(16)
    (6, 6, 2, 2)
    """

    counts: tuple[int, ...]
    weights: tuple[float, ...]

    def sizes(self, size: int) -> tuple[int, ...]:
        """The number of elements of each shard; at least one each if there are enough."""
        return _sizes(self, size)


@lru_cache(maxsize=65536)
def _sizes(shares: Shares, size: int) -> tuple[int, ...]:
    """Divides over one prime factor of the counts after the other. So the shards over an axis are
    unions of those over the axis and further ones, and over parts of the axis."""
    parts, weights = [size], [list(shares.weights)]
    for count in [prime for n in shares.counts for prime in _primes(n)]:
        groups = [_cut(of, count) for of in weights]
        parts = [
            part
            for whole, each in zip(parts, groups, strict=True)
            for part in apportioned(whole, [sum(of) for of in each], len(each[0]))
        ]
        weights = [of for each in groups for of in each]
    return tuple(parts)


def _cut(weights: list[float], count: int) -> list[list[float]]:
    size = len(weights) // count
    return [weights[i * size : (i + 1) * size] for i in range(count)]


def _primes(number: int) -> list[int]:
    """The prime factors, the smallest first."""
    for prime in range(2, math.isqrt(number) + 1):
        if number % prime == 0:
            return [prime, *_primes(number // prime)]
    return [number] if number > 1 else []


def apportioned(size: int, weights: Sequence[float], least: int = 1) -> list[int]:
    """Divides `size` elements so that the largest quotient of a part by its weight is as small as
    possible. Each part has at least `least` elements if there are enough for that, else at least
    one if there are enough.

    >>> apportioned(10, [0.45, 0.1, 0.45])
    [5, 1, 4]
    """
    total = math.fsum(weights)
    count = len(weights)
    least = least if size >= least * count else int(size >= count)
    parts = [max(least, math.floor(size * weight / total)) for weight in weights]
    while sum(parts) > size:  # the least sizes took more than there is
        at = max((i for i in range(count) if parts[i] > least), key=lambda i: parts[i] / weights[i])
        parts[at] -= 1
    while sum(parts) < size:
        at = min(range(count), key=lambda i: ((parts[i] + 1) / weights[i], i))
        parts[at] += 1
    return parts
