"""Finds a formula (a*x + b) // c for the size of an op's result, where x is the size of its
operand, by trying many sizes x."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxpar.layout.symbols import Polynomial, quotient

_WINDOWS = (24, 96, 384, 1536)
"""Numbers of consecutive sizes to try: 24 first, and more while no formula fits. The divisor c is
at most a third of that number."""

AFAR = 1 << 16
"""Added to an operand's size to see if the result's size depends on the operand's at all."""


def find_quotient(size_of: Callable[[int], int | None], first: int) -> tuple[int, int, int] | None:
    """Returns (a, b, c) with `size_of(x)` == (a*x + b) // c for all tried x, from `first` on, with
    the smallest c. None if no such formula fits, if `size_of` returns None, or if the size is
    constant."""
    if size_of(first) == size_of(first + AFAR):
        return None
    sizes: list[int] = []
    for count in _WINDOWS:
        for x in range(first + len(sizes), first + count):
            size = size_of(x)
            if size is None:
                return None
            sizes.append(size)
        found = _fraction(sizes, first)
        if found is not None:
            return found
    return None


def _fraction(sizes: Sequence[int], first: int) -> tuple[int, int, int] | None:
    """Returns (a, b, c) with sizes[i] == (a*(first + i) + b) // c for all i, with the smallest c;
    None if there are none."""
    for below in range(1, len(sizes) // 3 + 1):
        rises = {after - before for before, after in zip(sizes, sizes[below:], strict=False)}
        if len(rises) > 1:
            continue
        (times,) = rises
        if times <= 0:
            return None
        lowest = [below * y - times * x for x, y in enumerate(sizes, first)]
        shift = max(lowest)
        return (times, shift, below) if shift < min(lowest) + below else None
    return None


def applied(found: tuple[int, int, int], size: Polynomial) -> Polynomial:
    """Returns the closed form of (a*size + b) // c, where `found` is (a, b, c) of
    `find_quotient`."""
    times, shift, below = found
    return quotient(Polynomial.constant(times) * size + Polynomial.constant(shift), below)
