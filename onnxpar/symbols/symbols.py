"""Closed forms of sizes: polynomials of a model's symbols and of quotients, rounded down.

A convolution with a stride turns a width into `(width + 1) // 2`. A polynomial has such quotients
as variables, besides symbols; the numerator of a quotient is a polynomial, which can contain
further quotients.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

Binding = Mapping[str, int]
"""A size for every symbol."""


@dataclass(frozen=True)
class Quotient:
    """A size divided by a number, rounded down. Create it with `quotient`, which normalizes it, so
    that equal sizes compare equal."""

    over: Polynomial
    below: int

    def at(self, binding: Binding) -> int:
        """The value at a binding."""
        return self.over.at(binding) // self.below

    def __str__(self) -> str:
        text = str(self.over)
        return f"{text if self.over.symbol else f'({text})'} // {self.below}"


Variable = str | Quotient
"""A symbol, or a quotient."""
Monomial = tuple[Variable, ...]
"""Variables that are multiplied, in the order of their texts."""


@dataclass(frozen=True)
class Polynomial:
    """A sum of terms (monomial, coefficient), such as `2*batch*seq + 1`."""

    terms: tuple[tuple[Monomial, Fraction], ...]

    @staticmethod
    def constant(value: int) -> Polynomial:
        """A number as a polynomial."""
        return Polynomial((((), Fraction(value)),) if value else ())

    @staticmethod
    def variable(name: Variable) -> Polynomial:
        """A symbol or a quotient as a polynomial."""
        return Polynomial((((name,), Fraction(1)),))

    @property
    def variables(self) -> tuple[str, ...]:
        """The symbols, including those of quotients, sorted."""
        found: set[str] = set()
        for monomial, _ in self.terms:
            for v in monomial:
                found.update([v] if isinstance(v, str) else v.over.variables)
        return tuple(sorted(found))

    @property
    def quotients(self) -> tuple[Quotient, ...]:
        """All quotients; one inside the numerator of another comes before that other one."""
        found: list[Quotient] = []
        for monomial, _ in self.terms:
            for v in monomial:
                if isinstance(v, Quotient):
                    found += [*v.over.quotients, v]
        return tuple(dict.fromkeys(found))

    @property
    def symbol(self) -> str | None:
        """The symbol, if the polynomial is nothing but one symbol; else None."""
        if len(self.terms) == 1 and len(self.terms[0][0]) == 1 and self.terms[0][1] == 1:
            variable = self.terms[0][0][0]
            return variable if isinstance(variable, str) else None
        return None

    @property
    def denominator(self) -> int:
        """The common denominator of the coefficients."""
        return math.lcm(1, *(c.denominator for _, c in self.terms))

    def at(self, binding: Binding) -> int:
        """The value at a binding, rounded down to an integer."""
        below = self.denominator
        total = 0
        for monomial, coefficient in self.terms:
            term = coefficient.numerator * (below // coefficient.denominator)
            for variable in monomial:
                term *= _value(variable, binding)
            total += term
        return total // below

    def solve(self, symbol: str, binding: Binding, value: int) -> int | None:
        """The size of a symbol at which the polynomial has the given value; `binding` has the sizes
        of the other symbols. None if no integer solves that, if the polynomial is not linear in the
        symbol, or if a quotient contains the symbol."""
        if any(symbol in q.over.variables for q in self.quotients):
            return None
        if any(monomial.count(symbol) > 1 for monomial, _ in self.terms):
            return None
        base, slope = (self.at({**binding, symbol: i * 2**20}) for i in (0, 1))
        slope = (slope - base) // 2**20
        solved = (value - base) // slope if slope else 0
        return solved if slope and self.at({**binding, symbol: solved}) == value else None

    def __str__(self) -> str:
        below = self.denominator
        text = ""
        for monomial, coefficient in self.terms:
            number = int(coefficient * below)
            factors = [] if abs(number) == 1 and monomial else [str(abs(number))]
            alone = number > 0 and not factors and len(monomial) == 1
            factors += [str(v) if alone or isinstance(v, str) else f"({v})" for v in monomial]
            if text:
                text += " - " if number < 0 else " + "
            elif number < 0:
                text = "-"
            text += "*".join(factors)
        text = text or "0"
        return text if below == 1 else f"({text}) // {below}"

    @staticmethod
    def parse(text: str) -> Polynomial:
        """Parses the output of `str`, also with `floor(w / 2)` and `ceil`. Errors: ValueError for
        any other text."""
        try:
            return _parsed(ast.parse(text, mode="eval").body)
        except SyntaxError:
            raise ValueError(f"{text!r} is not a size") from None

    def replace(self, symbol: str, by: Polynomial) -> Polynomial:
        """The polynomial with a symbol replaced by another polynomial."""
        total = Polynomial(())
        for monomial, coefficient in self.terms:
            term = _polynomial([((), coefficient)])
            for v in monomial:
                if isinstance(v, Quotient):
                    term = term * quotient(v.over.replace(symbol, by), v.below)
                else:
                    term = term * (by if v == symbol else Polynomial.variable(v))
            total = total + term
        return total

    def __add__(self, other: Polynomial) -> Polynomial:
        return _polynomial([*self.terms, *other.terms])

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + Polynomial.constant(-1) * other

    def __mul__(self, other: Polynomial) -> Polynomial:
        return _polynomial(
            (tuple(sorted(a + b, key=str)), x * y) for a, x in self.terms for b, y in other.terms
        )


def quotient(over: Polynomial, below: int) -> Polynomial:
    """A size divided by a positive number and rounded down, in normal form: terms that divide
    evenly are outside the quotient, and nested quotients are merged."""
    assert below > 0
    over, below = over * Polynomial.constant(over.denominator), below * over.denominator
    outside = _polynomial((m, Fraction(c // below)) for m, c in over.terms)
    rest = _polynomial((m, c % below) for m, c in over.terms)
    varying = [(m, int(c)) for m, c in rest.terms if m]
    if not varying:
        return outside
    number = int(dict(rest.terms).get((), 0))
    common = math.gcd(below, *(c for _, c in varying))
    if common > 1:
        terms = [
            *((m, Fraction(c // common)) for m, c in varying),
            ((), Fraction(number // common)),
        ]
        return outside + quotient(_polynomial(terms), below // common)
    (monomial, times), *others = varying
    inner = monomial[0] if len(monomial) == 1 else None
    if not others and times == 1 and isinstance(inner, Quotient):
        shift = Polynomial.constant(number * inner.below)
        return outside + quotient(inner.over + shift, inner.below * below)
    return outside + Polynomial.variable(Quotient(rest, below))


def rounded_up(over: Polynomial, below: int) -> Polynomial:
    """A size divided by a positive number, rounded up."""
    over, below = over * Polynomial.constant(over.denominator), below * over.denominator
    return quotient(over + Polynomial.constant(below - 1), below)


def _value(variable: Variable, binding: Binding) -> int:
    return binding[variable] if isinstance(variable, str) else variable.at(binding)


def _polynomial(terms: Iterable[tuple[Monomial, Fraction]]) -> Polynomial:
    sums: dict[Monomial, Fraction] = {}
    for monomial, coefficient in terms:
        sums[monomial] = sums.get(monomial, Fraction(0)) + coefficient
    kept = [(m, c) for m, c in sums.items() if c]
    return Polynomial(tuple(sorted(kept, key=lambda t: (-len(t[0]), tuple(map(str, t[0]))))))


def _parsed(node: ast.expr) -> Polynomial:
    if isinstance(node, ast.Name):
        return Polynomial.variable(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Polynomial.constant(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return Polynomial.constant(-1) * _parsed(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        inner = _parsed(node.args[0])
        if node.func.id == "floor":
            return quotient(inner, 1)
        if node.func.id == "ceil":
            return rounded_up(inner, 1)
    if isinstance(node, ast.BinOp):
        return _parsed_operation(node)
    raise ValueError(f"{ast.unparse(node)!r} is not a size")


def _parsed_operation(node: ast.BinOp) -> Polynomial:
    left, right = _parsed(node.left), _parsed(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, (ast.FloorDiv, ast.Div)) and not right.variables and right.terms:
        by = right.terms[0][1]
        if isinstance(node.op, ast.Div):
            return _polynomial((m, c / by) for m, c in left.terms)
        if by.denominator == 1 and by > 0:
            return quotient(left, int(by))
    raise ValueError(f"{ast.unparse(node)!r} is not a size")
