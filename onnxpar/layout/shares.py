"""Sizes of shards in proportion to shares of the ranks (fast and slow ones); for open sizes, in
closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise


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
        """Returns the number of elements of each shard. None is empty, if there are enough
        elements."""
        return _sizes(self, size)


@lru_cache(maxsize=65536)
def _sizes(shares: Shares, size: int) -> tuple[int, ...]:
    """The sizes of `Shares.sizes`. Divides by the prime factors of `counts`, one after the other,
    so that shards over an axis are unions of shards over its sub-axes, or over this axis and
    further ones."""
    parts, weights = [size], [list(shares.weights)]
    for count in [prime for n in shares.counts for prime in _primes(n)]:
        groups = [_cut(of, count) for of in weights]
        parts = [
            part
            for whole, group in zip(parts, groups, strict=True)
            for part in apportioned(whole, [sum(of) for of in group], len(group[0]))
        ]
        weights = [of for group in groups for of in group]
    return tuple(parts)


@dataclass(frozen=True)
class Proportion:
    """Divides an open size over the ranks along axes in proportion to integer `weights`, in the
    row-major order of the axes. Each bound between shards is rounded to the nearest integer, which
    has a closed form; so a shard may be empty even if there are enough elements for all ranks.

    >>> Proportion((3, 1)).sizes(6)
    (5, 1)
    """

    weights: tuple[int, ...]

    def bound(self, size: int, at: int) -> int:
        """Returns the number of elements in all shards before shard `at`: where that shard
        starts."""
        total = sum(self.weights)
        return (2 * size * sum(self.weights[:at]) + total) // (2 * total)

    def sizes(self, size: int) -> tuple[int, ...]:
        """The number of elements of each shard."""
        total = sum(self.weights)
        before = accumulate(self.weights, initial=0)
        bounds = [(2 * size * w + total) // (2 * total) for w in before]
        return tuple(b - a for a, b in pairwise(bounds))

    def __str__(self) -> str:
        return ":".join(map(str, self.weights))


def integer_weights(shares: Sequence[float]) -> tuple[int, ...]:
    """Returns small integers in proportion to shares, each at least 1: the integers with the
    smallest sum that are exact to 1 percent; if there are none up to `most_weight`, the most exact
    ones.

    >>> integer_weights([0.5, 0.1667, 0.3333])
    (3, 1, 2)
    """
    total, least = math.fsum(shares), math.inf
    best: tuple[int, ...] = ()
    for count in range(len(shares), most_weight(len(shares)) + 1):
        weights = apportioned(count, shares)
        pairs = zip(weights, shares, strict=True)
        error = max(abs(w * total / (count * share) - 1) for w, share in pairs)
        if error < least:
            best, least = tuple(weights), error
        if error <= _EXACT:
            break
    return best


def most_weight(ranks: int) -> int:
    """Returns the largest sum that `integer_weights` may have for a number of ranks. It is small,
    because the compiler must sample sizes with every remainder modulo this sum."""
    return max(4 * ranks, 16)


_EXACT = 0.01


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
    """Divides `size` elements into integer parts in proportion to weights, so that the largest
    quotient of a part and its weight is as small as possible. Each part has at least `least`
    elements; if `size` is too small for that, at least one; if there are more parts than elements,
    some are empty.

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
