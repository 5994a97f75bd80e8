"""Finds the smallest number of ranks on which a model fits, for the error where the user gave
fewer."""

from __future__ import annotations

from collections.abc import Callable

CONSECUTIVE = 8
"""This many numbers are tried one by one; then the steps between tried numbers grow."""


def enough_devices(fits: Callable[[int], bool], first: int, most: int) -> int | None:
    """Returns the smallest number from `first` to `most` for which `fits` is True; None if it is
    False even for `most`. Tries the first numbers one by one, then with growing steps; bisects
    between the last number that does not fit and the first number that fits."""
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
