"""How a result's size depends on an operand's, found by asking for many sizes of the operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxpar.symbols.symbols import Polynomial, quotient

_WINDOWS = (24, 96, 384, 1536)
"""Consecutive sizes that are asked for: a stride shows where a third of them repeats."""

AFAR = 1 << 16
"""How much larger an operand is made to see whether the result's size depends on it at all."""


def find_quotient(size_of: Callable[[int], int | None], first: int) -> tuple[int, int, int] | None:
    """(a, b, c) such that `size_of(x)` is (a*x + b) // c for all x from `first` on that are asked
    for, c as small as it can be; None where there are none."""
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
    """The quotient of a size."""
    times, shift, below = found
    return quotient(Polynomial.constant(times) * size + Polynomial.constant(shift), below)
