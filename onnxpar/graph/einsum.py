"""The dimensions that the equation of an Einsum names, and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Size = TypeVar("Size")


def einsum_dims(
    equation: str, ranks: Sequence[int], broadcast: Callable[[int], Sequence[str]]
) -> tuple[list[list[str]], list[str]]:
    """Returns the names of the dimensions of each operand, and of the result: "ij,jk->ik" gives
    [["i", "j"], ["j", "k"]], ["i", "k"].

    ranks      each operand's number of dimensions
    broadcast  takes the number of dimensions that `...` stands for, and returns names for them; an
               operand with fewer of them has the last ones
    """
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
    """Returns the size of each dimension by name, from the names and sizes of each operand. If
    operands differ, because one is broadcast, the size that is not 1."""
    sizes: dict[str, Size] = {}
    for dims, shape in zip(terms, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if sizes.get(dim, 1) == 1:
                sizes[dim] = size
    return sizes
