"""Open sizes that a Reshape requires to be equal, so that its operand has as many elements as its
result."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxpar.symbols.symbols import Polynomial


def is_possible(shape: Sequence[int], target: Sequence[int]) -> bool:
    """True if a tensor of this shape can be reshaped to `target`, which may have a -1, and zeros
    that stand for the tensor's own sizes."""
    sizes = [shape[i] if n == 0 and i < len(shape) else n for i, n in enumerate(target)]
    known = math.prod(n for n in sizes if n >= 0)
    count = math.prod(shape)
    return count % known == 0 if -1 in sizes and known else -1 in sizes or count == known


def equal_symbols(
    shape: Sequence[Polynomial | None], target: Sequence[Polynomial | None]
) -> tuple[str, str] | None:
    """Two symbols that must be equal for a Reshape to be possible at all sizes: one of the shape,
    and one of the target. None if there are no such symbols, or if they are not unique.

    Only products count. Of several symbols in the shape, it is the one in the same dimension: a
    batch becomes a batch.
    """
    own = [_symbol(size) for size in shape]
    new = [_symbol(size) for size in target]
    if None in own or None in [n for n, size in zip(new, target, strict=True) if size is not None]:
        return None
    left = {i: s for i, s in enumerate(own) if s and s not in new}
    over = {i: s for i, s in enumerate(new) if s and s not in own}
    if len(set(over.values())) != 1:
        return None
    axis, symbol = next(iter(over.items()))
    if axis in left:
        return left[axis], symbol
    return (next(iter(left.values())), symbol) if len(left) == 1 else None


def _symbol(size: Polynomial | None) -> str | None:
    """The symbol of a size that is a multiple of one symbol; "" for a number; None otherwise."""
    if size is None or len(size.terms) > 1:
        return None
    monomials = [m for m, _ in size.terms if m]
    if not monomials:
        return ""
    ((symbol, *others),) = monomials
    return symbol if isinstance(symbol, str) and not others else None
