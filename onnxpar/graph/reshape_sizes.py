"""Open sizes that must be equal, so that the operand of a Reshape has as many elements as its
result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from onnxpar.layout.symbols import Polynomial


def is_possible(shape: Sequence[int], target: Sequence[int]) -> bool:
    """True if a tensor of this shape can be reshaped to `target`, in which -1 is the remaining
    size, and 0 the tensor's own size at that position."""
    sizes = [shape[i] if n == 0 and i < len(shape) else n for i, n in enumerate(target)]
    known = math.prod(n for n in sizes if n >= 0)
    count = math.prod(shape)
    return count % known == 0 if -1 in sizes and known else -1 in sizes or count == known


def proportion(
    shape: Sequence[Polynomial | None], target: Sequence[Polynomial | None]
) -> tuple[str, str, Fraction] | None:
    """Returns (symbol a of the shape, symbol b of the target, factor), where a Reshape requires a
    == factor * b at all sizes: from [n, 64] to [m, 32] gives ("n", "m", 1/2). None if there are no
    such symbols, or several.

    Only the numbers of elements count. Of several symbols in the shape, the one at the position of
    the target's symbol is meant, because a batch stays a batch. If the target has a dimension of
    any size (None), the factor is 1.
    """
    own = [_multiple(size) for size in shape]
    new = [_multiple(size) for size in target if size is not None]
    if None in own or None in new:
        return None
    before, after = (
        math.prod((found[0] for found in each if found), start=Fraction(1)) for each in (own, new)
    )
    if not before or not after:
        return None
    multiple = Fraction(1) if None in target else after / before
    names = [[found[1] for found in each if found] for each in (own, new)]
    left = [s for s in names[0] if s and s not in names[1]]
    over = [s for s in names[1] if s and s not in names[0]]
    if len(set(over)) != 1:
        return None
    wanted = [size is not None and over[0] in size.variables for size in target].index(True)
    if wanted < len(names[0]) and names[0][wanted] in left:
        return names[0][wanted], over[0], multiple
    return (left[0], over[0], multiple) if len(left) == 1 else None


def _multiple(size: Polynomial | None) -> tuple[Fraction, str] | None:
    """Returns (number, symbol), whose product is this size, with "" for no symbol: 4*n gives (4,
    "n"). None for other sizes."""
    if size is None or len(size.terms) > 1:
        return None
    ((monomial, number),) = size.terms or (((), Fraction(0)),)
    if not monomial:
        return number, ""
    symbol, *others = monomial
    return (number, symbol) if isinstance(symbol, str) and not others else None
