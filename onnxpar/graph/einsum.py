"""The dimensions that the equation of an Einsum names, and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Size = TypeVar("Size")


def einsum_dims(
    equation: str, ranks: Sequence[int], broadcast: Callable[[int], Sequence[str]]
) -> tuple[list[list[str]], list[str]]:
    """The names of the dimensions of each operand, given the operands' numbers of dimensions, and
    of the result. `broadcast` gives names to the dimensions of `...`, given their number; operands
    with fewer of them have the last ones."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    widths = [
        rank - len(term.replace("...", "")) if "..." in term else 0
        for term, rank in zip(terms, ranks, strict=True)
    ]
    count = max(widths)
    dots = list(broadcast(count))
    if not arrow:
        once = sorted({c for c in left if c.isalpha() and left.count(c) == 1})
        right = ("..." if count else "") + "".join(once)

    def dims(term: str, width: int) -> list[str]:
        before, _, after = term.partition("...")
        return [*before, *dots[count - width :], *after]

    out = dims(right, count if "..." in right else 0)
    return [dims(term, width) for term, width in zip(terms, widths, strict=True)], out


def einsum_sizes(
    terms: Sequence[Sequence[str]], shapes: Sequence[Sequence[Size]]
) -> dict[str, Size]:
    """The size of each dimension, by name: of an operand in which it is not 1, if there is one."""
    sizes: dict[str, Size] = {}
    for dims, shape in zip(terms, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if sizes.get(dim, 1) == 1:
                sizes[dim] = size
    return sizes
