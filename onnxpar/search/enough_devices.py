"""The smallest number of ranks that fits a model, when the given number does not."""

from __future__ import annotations

from collections.abc import Callable

CONSECUTIVE = 8
"""Numbers that are tried one by one before steps grow."""


def enough_devices(fits: Callable[[int], bool], first: int, most: int) -> int | None:
    """The smallest number from `first` on that fits; None if not even `most` does. The first few
    are tried one by one, then ever larger ones, then by bisection between the last two."""
    low, step = first - 1, 1
    while True:
        number = min(low + step, most)
        if number <= low:
            return None
        if fits(number):
            break
        low = number
        if number >= first + CONSECUTIVE:
            step *= 2
    high = number
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
