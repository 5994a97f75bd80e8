"""Solves the equation of two sizes for a symbol."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from onnxpar.layout.symbols import Polynomial, Quotient, without

_LARGEST = 4096
"""Largest number of which a solution may require a symbol to be a multiple."""


def solve_tie(a: Polynomial, b: Polynomial, order: Sequence[str]) -> tuple[str, Polynomial] | None:
    """A symbol and a polynomial that replaces it, so that both sizes become equal; None if none is
    found. If several symbols can be replaced, it is the one whose replacement has the fewest
    negative terms; of these, the last in `order`."""
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
    """The size divided by the variables that all its terms share. Variables are positive, so the
    size and the result are 0 for the same values."""
    for variable in size.terms[0][0] if size.terms else ():
        size = without(size, (variable,)) or size
    return size


def _linear(size: Polynomial, symbol: str) -> Polynomial | None:
    """The polynomial that a symbol must equal for a size to be 0. None unless the symbol alone is
    one term and occurs in no other, and all coefficients of the result are integers."""
    own = [c for m, c in size.terms if m == (symbol,)]
    rest = Polynomial(tuple((m, c) for m, c in size.terms if m != (symbol,)))
    if not own or symbol in rest.variables:
        return None
    terms = tuple((m, -c / own[0]) for m, c in rest.terms)
    whole = all(c.denominator == 1 for _, c in terms)
    return Polynomial(terms) if whole and terms else None


def _multiple(size: Polynomial) -> tuple[str, Polynomial] | None:
    """The only symbol of a size, and its replacement: a new symbol times a number, plus a
    remainder. None unless the size is 0 exactly at these multiples."""
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
    """The name of a symbol that counts units: `width_by_32` for the width in units of 32."""
    found = re.fullmatch(r"(.+)_by_(\d+)", symbol)
    return f"{found[1]}_by_{int(found[2]) * step}" if found else f"{symbol}_by_{step}"
