"""How many ranks would do, where those at hand do not."""

from __future__ import annotations

from collections.abc import Callable

IN_TURN = 8
"""Numbers that are tried one after the other; then steps grow."""


def enough_devices(fits: Callable[[int], bool], first: int, most: int) -> int | None:
    """The smallest number from `first` on that fits: each is tried, then ever larger ones, between
    the last two of which is halved. None where even `most` do not fit."""
    low, step = first - 1, 1
    while True:
        number = min(low + step, most)
        if number <= low:
            return None
        if fits(number):
            break
        low = number
        if number >= first + IN_TURN:
            step *= 2
    high = number
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
