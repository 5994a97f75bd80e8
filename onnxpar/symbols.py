"""Symbolic sizes: polynomials of the symbols that a model leaves open, found from samples.

A model with open sizes is inferred at several bindings at once. Whatever differs between them
depends on the symbols, and how it does is the simplest polynomial that holds at every binding. So
all of the compiler works with numbers, at the first binding; the others tell what to make of them.
"""

from __future__ import annotations

import ast
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

Binding = Mapping[str, int]
"""A size for every symbol."""
Monomial = tuple[str, ...]
"""Variables that are multiplied, in alphabetical order."""

FEWEST, MOST = 8, 32
"""Bindings that a polynomial must agree with: as many as there are ranks, within these bounds, so
that sizes leave every remainder."""
ENOUGH = 6
"""Bindings that must be left when those are dropped at which sizes coincide."""
_DEGREE = 3


@dataclass(frozen=True)
class Polynomial:
    """A sum of (monomial, coefficient): the size that its text says, `2*batch*seq + 1`."""

    terms: tuple[tuple[Monomial, Fraction], ...]

    @staticmethod
    def constant(value: int) -> Polynomial:
        """A number."""
        return Polynomial((((), Fraction(value)),) if value else ())

    @staticmethod
    def variable(name: str) -> Polynomial:
        """A symbol alone."""
        return Polynomial((((name,), Fraction(1)),))

    @property
    def variables(self) -> tuple[str, ...]:
        """The symbols in it, sorted."""
        return tuple(sorted({v for monomial, _ in self.terms for v in monomial}))

    @property
    def symbol(self) -> str | None:
        """The symbol that it is, if it is one alone."""
        if len(self.terms) == 1 and len(self.terms[0][0]) == 1 and self.terms[0][1] == 1:
            return self.terms[0][0][0]
        return None

    @property
    def denominator(self) -> int:
        """What the sum of the terms, with whole coefficients, is divided by."""
        return math.lcm(1, *(c.denominator for _, c in self.terms))

    def at(self, binding: Binding) -> int:
        """Its value; rounded down where it is no whole number there."""
        total = sum(
            (c * math.prod(binding[v] for v in monomial) for monomial, c in self.terms), Fraction(0)
        )
        return math.floor(total)

    def solve(self, symbol: str, binding: Binding, value: int) -> int | None:
        """The value of a symbol for which it has this value; None where it is not linear in the
        symbol, or no whole number solves it."""
        if any(monomial.count(symbol) > 1 for monomial, _ in self.terms):
            return None
        base, slope = (self.at({**binding, symbol: i * 2**20}) for i in (0, 1))
        slope = (slope - base) // 2**20
        solved = (value - base) // slope if slope else 0
        return solved if slope and self.at({**binding, symbol: solved}) == value else None

    def __str__(self) -> str:
        below = self.denominator
        parts = []
        for monomial, coefficient in self.terms:
            number = int(coefficient * below)
            factors = [] if number == 1 and monomial else [str(number)]
            parts.append("*".join([*factors, *monomial]))
        text = " + ".join(parts) or "0"
        return text if below == 1 else f"({text}) // {below}"

    @staticmethod
    def parse(text: str) -> Polynomial:
        """Reads what `str` writes, and the like. Errors: ValueError for anything else."""
        try:
            return _parsed(ast.parse(text, mode="eval").body)
        except SyntaxError:
            raise ValueError(f"{text!r} is no size") from None

    def replace(self, symbol: str, by: Polynomial) -> Polynomial:
        """The polynomial with a symbol written otherwise."""
        total = Polynomial(())
        for monomial, coefficient in self.terms:
            term = _polynomial([((), coefficient)])
            for name in monomial:
                term = term * (by if name == symbol else Polynomial.variable(name))
            total = total + term
        return total

    def __add__(self, other: Polynomial) -> Polynomial:
        return _polynomial([*self.terms, *other.terms])

    def __mul__(self, other: Polynomial) -> Polynomial:
        return _polynomial(
            (tuple(sorted(a + b)), x * y) for a, x in self.terms for b, y in other.terms
        )


def _polynomial(terms: Iterable[tuple[Monomial, Fraction]]) -> Polynomial:
    sums: dict[Monomial, Fraction] = {}
    for monomial, coefficient in terms:
        sums[monomial] = sums.get(monomial, Fraction(0)) + coefficient
    kept = [(m, c) for m, c in sums.items() if c]
    return Polynomial(tuple(sorted(kept, key=lambda t: (-len(t[0]), t[0]))))


def _parsed(node: ast.expr) -> Polynomial:
    if isinstance(node, ast.Name):
        return Polynomial.variable(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Polynomial.constant(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return Polynomial.constant(-1) * _parsed(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _parsed(node.left), _parsed(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left + Polynomial.constant(-1) * right
        if isinstance(node.op, ast.Mult):
            return left * right
        divides = isinstance(node.op, (ast.FloorDiv, ast.Div))
        if divides and not right.variables and right.terms:
            inverse = 1 / right.terms[0][1]
            return _polynomial((m, c * inverse) for m, c in left.terms)
    raise ValueError(f"{ast.unparse(node)!r} is no size")


def sample(symbols: Sequence[str], least: int, taken: Iterable[int], attempt: int) -> list[Binding]:
    """Bindings to infer a model at: sizes of at least `least`, consecutive for each symbol so that
    they leave every remainder, and different from each other in each binding. The first is of
    sizes that are not `taken`, where that is possible. Later attempts are smaller, then rounder."""
    source = random.Random(attempt)
    step, low, high = ((1, 11, 60), (1, 4, 16), (16, 1, 16), (32, 1, 16))[attempt]
    count = min(max(FEWEST, least), MOST)
    low = max(low, -(-least // step))
    last = max(low, high - count)
    rows: list[tuple[int, ...]] = []
    for _ in range(_TRIES):
        columns = []
        for _ in symbols:
            start = source.randint(low, last)
            columns.append(source.sample(range(start, start + count), count))
        rows = [tuple(n * step for n in row) for row in zip(*columns, strict=True)]
        if all(len(set(row)) == len(symbols) for row in rows):
            break
    busy = set(taken)
    rows.sort(key=lambda row: len(busy.intersection(row)))
    return [dict(zip(symbols, row, strict=True)) for row in rows]


_TRIES = 100
ATTEMPTS = 4
"""How many ways `sample` knows."""


def fit(values: Sequence[int], variables: Mapping[str, Sequence[int]]) -> Polynomial | None:
    """The simplest polynomial of the variables with these values, None where there is none.

    `variables` gives each one's value at every sample. At most three terms, of which one is a
    number, so that several samples stand against what is found by chance.
    """
    return next(iter(fits(values, variables)), None)


def fits(values: Sequence[int], variables: Mapping[str, Sequence[int]]) -> tuple[Polynomial, ...]:
    """All polynomials that are as simple as the simplest with these values."""
    return _fits(tuple(values), tuple((n, tuple(v)) for n, v in variables.items()))


@lru_cache(maxsize=65536)
def _fits(
    values: tuple[int, ...], variables: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[Polynomial, ...]:
    if len(set(values)) == 1:
        return (Polynomial.constant(values[0]),)
    columns = _monomials(variables)
    lines = [(m, line) for m, column in columns.items() if (line := _line(values, column))]
    multiples = tuple(_polynomial([(m, a)]) for m, (a, b) in lines if b == 0)
    if multiples:
        return _simplest(multiples)
    if lines:
        return _simplest([_polynomial([(m, a), ((), b)]) for m, (a, b) in lines])
    pairs = itertools.combinations(columns.items(), 2)
    planes = [(m, n, _plane(values, a, b)) for (m, a), (n, b) in pairs]
    return _simplest([_polynomial([(m, p[0]), (n, p[1]), ((), p[2])]) for m, n, p in planes if p])


def _simplest(found: Sequence[Polynomial]) -> tuple[Polynomial, ...]:
    """Those of the least denominator and degree."""

    def weight(polynomial: Polynomial) -> tuple[int, int]:
        return polynomial.denominator, max(len(monomial) for monomial, _ in polynomial.terms)

    least = min(map(weight, found), default=None)
    return tuple(p for p in found if weight(p) == least)


def _monomials(
    variables: tuple[tuple[str, tuple[int, ...]], ...],
) -> dict[Monomial, tuple[int, ...]]:
    """Monomials and their values, the simplest first; those that never vary are left out."""
    out: dict[Monomial, tuple[int, ...]] = {}
    for degree in range(1, _DEGREE + 1):
        for chosen in itertools.combinations_with_replacement(sorted(variables), degree):
            column = tuple(math.prod(row) for row in zip(*(v for _, v in chosen), strict=True))
            if len(set(column)) > 1:
                out[tuple(name for name, _ in chosen)] = column
    return out


def _line(values: tuple[int, ...], column: tuple[int, ...]) -> tuple[Fraction, Fraction] | None:
    """(a, b) of values = a * column + b."""
    other = next(i for i, c in enumerate(column) if c != column[0])
    slope = Fraction(values[other] - values[0], column[other] - column[0])
    base = values[0] - slope * column[0]
    right = all(slope * c + base == v for v, c in zip(values, column, strict=True))
    return (slope, base) if right and slope else None


def _plane(
    values: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[Fraction, Fraction, Fraction] | None:
    """(x, y, z) of values = x * a + y * b + z, with whole x and y."""
    rows = [(p - a[0], q - b[0], v - values[0]) for p, q, v in zip(a, b, values, strict=True)]
    for (p, q, v), (r, s, w) in itertools.combinations(rows[1:], 2):
        below = p * s - q * r
        if below == 0:
            continue
        x, y = Fraction(v * s - q * w, below), Fraction(p * w - v * r, below)
        if x.denominator > 1 or y.denominator > 1 or not x or not y:
            return None
        right = all(x * p + y * q == v for p, q, v in rows)
        return (x, y, values[0] - x * a[0] - y * b[0]) if right else None
    return None
