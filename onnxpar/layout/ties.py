"""Solves an equation between two sizes for one symbol: if both must be equal, one symbol is
replaced."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from onnxpar.layout.symbols import Polynomial, Quotient, without

_LARGEST = 4096
"""A solution may require a symbol to be a multiple of at most this number."""


def solve_tie(a: Polynomial, b: Polynomial, order: Sequence[str]) -> tuple[str, Polynomial] | None:
    """Returns (symbol, replacement), so that both sizes become equal once the symbol is replaced;
    None if none is known. `2*a` and `b` give ("b", 2*a). If several symbols can be solved for, it
    is the one whose replacement has the fewest negative terms; of these, the last in `order`."""
    difference = _without_common_factor(a - b)
    if not difference.variables:
        return None
    found = [(s, by) for s in order if (by := _linear(difference, s)) is not None]
    if found:
        return min(found, key=lambda each: (_negative_terms(each[1]), -order.index(each[0])))
    return _multiple(difference)


def _negative_terms(size: Polynomial) -> int:
    """Number of negative terms; replacements with few of them are preferred."""
    return sum(c < 0 for _, c in size.terms)


def _without_common_factor(size: Polynomial) -> Polynomial:
    """Returns the size divided by the variables that all its terms share: a*b - a becomes b - 1.
    Variables are positive, so both are 0 for the same values."""
    for variable in size.terms[0][0] if size.terms else ():
        size = without(size, (variable,)) or size
    return size


def _linear(size: Polynomial, symbol: str) -> Polynomial | None:
    """Returns what `symbol` must equal for the size to be 0: 2*a - b gives 2*a for b. None unless
    the symbol occurs in one term alone, as its only variable, and the result has integer
    coefficients."""
    own = [c for m, c in size.terms if m == (symbol,)]
    rest = Polynomial(tuple((m, c) for m, c in size.terms if m != (symbol,)))
    if not own or symbol in rest.variables:
        return None
    terms = tuple((m, -c / own[0]) for m, c in rest.terms)
    whole = all(c.denominator == 1 for _, c in terms)
    return Polynomial(terms) if whole and terms else None


def _multiple(size: Polynomial) -> tuple[str, Polynomial] | None:
    """For a size with quotients of a single symbol, returns (symbol, replacement), where the
    replacement is a new symbol times a number plus a remainder: `n - 2*(n // 2)` gives 2*n_by_2.
    None unless the size is 0 exactly at these multiples."""
    if len(size.variables) != 1:
        return None
    (symbol,) = size.variables
    below = [atom.below for atom in size.atoms if isinstance(atom, Quotient)]
    period = math.lcm(*below) if below and len(below) == len(size.atoms) else 0
    if not 1 < period <= _LARGEST:
        return None
    first = 64 * period
    zero = [n for n in range(period) if size.at({symbol: first + n}) == 0]
    again = [n for n in range(period) if size.at({symbol: first + 7 * period + n}) == 0]
    if not zero or zero != again:
        return None
    step = period // len(zero)
    if zero != list(range(zero[0], period, step)):
        if zero[0] != 0:
            return None
        step = period
    rest = zero[0]
    name = _name(symbol, step)
    return symbol, Polynomial.constant(step) * Polynomial.variable(name) + Polynomial.constant(rest)


def _name(symbol: str, step: int) -> str:
    """Returns the name of a symbol that counts units of `step`: `width_by_32` for the width in
    units of 32."""
    found = re.fullmatch(r"(.+)_by_(\d+)", symbol)
    return f"{found[1]}_by_{int(found[2]) * step}" if found else f"{symbol}_by_{step}"
