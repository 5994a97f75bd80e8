"""Closed forms of sizes: polynomials of a model's symbols and of atoms, which are quotients
(rounded down) and minima.

A convolution with a stride turns a width into `(width + 1) // 2`, a slice turns it into `min(width,
512)`. A polynomial has such atoms as variables, besides symbols; the operands of atoms are
polynomials, which can contain further atoms. Maxima, comparisons, and choices between two sizes are
polynomials of minima. All symbols and atoms are integers of at least 0, so a polynomial without
negative coefficients is at least 0, too.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_LARGEST_MERGED = 32
"""A size of a larger `weight` is not taken apart when minima are merged, so that closed forms stay
short."""
Binding = Mapping[str, int]
"""A size for every symbol."""


@dataclass(frozen=True)
class Quotient:
    """The size `over // below`, a variable that polynomials can contain. Create it with `quotient`,
    which normalizes, so that equal sizes compare equal."""

    over: Polynomial
    below: int

    @property
    def operands(self) -> tuple[Polynomial, ...]:
        """The polynomials inside: the numerator alone, because the divisor is a number."""
        return (self.over,)

    def at(self, binding: Binding) -> int:
        """Returns the value at a binding (a size for every symbol)."""
        return self.over.at(binding) // self.below

    def replace(self, symbol: str, by: Polynomial) -> Polynomial:
        """Returns the quotient with the polynomial `by` in place of a symbol."""
        return quotient(self.over.replace(symbol, by), self.below)

    def __str__(self) -> str:
        text = str(self.over)
        return f"{text if self.over.symbol else f'({text})'} // {self.below}"


@dataclass(frozen=True)
class Minimum:
    """The least of several sizes, a variable that polynomials can contain. Create it with
    `minimum`, which normalizes, so that equal sizes compare equal."""

    operands: tuple[Polynomial, ...]

    def at(self, binding: Binding) -> int:
        """Returns the value at a binding (a size for every symbol)."""
        return min(operand.at(binding) for operand in self.operands)

    def replace(self, symbol: str, by: Polynomial) -> Polynomial:
        """Returns the minimum with the polynomial `by` in place of a symbol."""
        return minimum(*(operand.replace(symbol, by) for operand in self.operands))

    def __str__(self) -> str:
        return f"min({', '.join(map(str, self.operands))})"


Atom = Quotient | Minimum
Variable = str | Atom
"""A symbol of the model ("batch"), or an atom."""
Monomial = tuple[Variable, ...]
"""Variables to multiply, sorted by their texts; () is 1."""


@dataclass(frozen=True)
class Polynomial:
    """A sum of terms (monomial, coefficient), such as `2*batch*seq + 1`: the closed form of a
    size."""

    terms: tuple[tuple[Monomial, Fraction], ...]

    @staticmethod
    def constant(value: int | Fraction) -> Polynomial:
        """A number as a polynomial."""
        return Polynomial((((), Fraction(value)),) if value else ())

    @staticmethod
    def variable(name: Variable) -> Polynomial:
        """Returns a symbol, quotient or minimum as a polynomial."""
        return Polynomial((((name,), Fraction(1)),))

    @property
    def variables(self) -> tuple[str, ...]:
        """The symbols on which the size depends, also inside quotients and minima, sorted."""
        found: set[str] = set()
        for monomial, _ in self.terms:
            for v in monomial:
                found.update([v] if isinstance(v, str) else symbols_of(v))
        return tuple(sorted(found))

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """All quotients and minima in the polynomial; one inside another comes before the outer
        one."""
        found: list[Atom] = []
        for monomial, _ in self.terms:
            for v in monomial:
                if not isinstance(v, str):
                    found += [atom for operand in v.operands for atom in operand.atoms]
                    found.append(v)
        return tuple(dict.fromkeys(found))

    @property
    def number(self) -> Fraction | None:
        """The value, if the polynomial is a constant; None if it depends on symbols."""
        if not self.terms:
            return Fraction(0)
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def weight(self) -> int:
        """The length of the closed form: the number of terms and of variables in them, also inside
        quotients and minima."""
        atoms = [v for monomial, _ in self.terms for v in monomial if not isinstance(v, str)]
        inner = sum(operand.weight for atom in atoms for operand in atom.operands)
        return len(self.terms) + sum(len(monomial) for monomial, _ in self.terms) + inner

    @property
    def is_natural(self) -> bool:
        """True if the value is provably at least 0 for all sizes of the symbols; False may also
        mean unknown."""
        return _is_natural(self)

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
        """Returns the value at a binding (a size for every symbol), rounded down to an integer."""
        total, below = self._ratio(binding)
        return total // below

    def exactly_at(self, binding: Binding) -> Fraction:
        """Returns the value at a binding as a fraction."""
        return Fraction(*self._ratio(binding))

    def _ratio(self, binding: Binding) -> tuple[int, int]:
        below = self.denominator
        total = 0
        for monomial, coefficient in self.terms:
            term = coefficient.numerator * (below // coefficient.denominator)
            for variable in monomial:
                term *= _value(variable, binding)
            total += term
        return total, below

    def solve(self, symbol: str, binding: Binding, value: int) -> int | None:
        """Returns the size of `symbol` at which the polynomial has this value, where `binding` has
        the sizes of the other symbols: 2*n + b == 7 at b=1 gives n = 3. None if no integer does, if
        the polynomial is not linear in the symbol, or if a quotient or minimum contains it."""
        if any(symbol in symbols_of(atom) for atom in self.atoms):
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
            bare = [alone or not isinstance(v, Quotient) for v in monomial]
            factors += [str(v) if b else f"({v})" for v, b in zip(monomial, bare, strict=True)]
            if text:
                text += " - " if number < 0 else " + "
            elif number < 0:
                text = "-"
            text += "*".join(factors)
        text = text or "0"
        return text if below == 1 else f"({text}) // {below}"

    @staticmethod
    def parse(text: str) -> Polynomial:
        """Returns the polynomial of a text as `str` writes it; also reads `floor(w / 2)`, `ceil`
        and `max`. Errors: ValueError for any other text."""
        try:
            return _parsed(ast.parse(text, mode="eval").body)
        except SyntaxError:
            raise ValueError(f"{text!r} is not a size") from None

    def replace(self, symbol: str, by: Polynomial) -> Polynomial:
        """Returns the polynomial with `by` in place of a symbol."""
        total = Polynomial(())
        for monomial, coefficient in self.terms:
            term = _polynomial([((), coefficient)])
            for v in monomial:
                if isinstance(v, str):
                    term = term * (by if v == symbol else Polynomial.variable(v))
                else:
                    term = term * v.replace(symbol, by)
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
    """Returns over // below in normal form: terms that divide evenly are outside the quotient, and
    nested quotients are merged. `quotient(4*n + m, 2)` is 2*n + m // 2."""
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
    """Returns over / below, rounded up, in normal form."""
    over, below = over * Polynomial.constant(over.denominator), below * over.denominator
    return quotient(over + Polynomial.constant(below - 1), below)


def minimum(*sizes: Polynomial) -> Polynomial:
    """Returns the least of several sizes in normal form: common terms are outside the minimum,
    nested minima are merged, and sizes that are never less than another one are left out.
    `minimum(n + 2, n + m)` is n + min(2, m)."""
    every = list(dict.fromkeys(each for size in sizes for each in _alternatives(size)))
    least = [p for p in every if not any(q != p and (p - q).is_natural for q in every)]
    if len(least) == 1:
        return least[0]
    coefficients = [dict(p.terms) for p in least]
    monomials = {m for found in coefficients for m in found}
    common = _polynomial(
        (m, min(found.get(m, Fraction(0)) for found in coefficients)) for m in monomials
    )
    rests = [p - common for p in least]
    if any(len(_alternatives(rest)) > 1 for rest in rests):
        return common + minimum(*rests)
    below = math.lcm(*(rest.denominator for rest in rests))
    factor = math.gcd(*(int(c * below) for rest in rests for _, c in rest.terms))
    operands = (_polynomial((m, c * below / factor) for m, c in rest.terms) for rest in rests)
    atom = Minimum(tuple(sorted(operands, key=lambda p: (p.number is not None, str(p)))))
    return common + _polynomial([((atom,), Fraction(factor, below))])


@lru_cache(maxsize=65536)
def _is_natural(size: Polynomial) -> bool:
    """True if no coefficient is negative, once each quotient or minimum that is a term has been
    replaced by a lower bound or, if it is subtracted, by an upper bound."""
    for monomial, coefficient in size.terms:
        atoms = [v for v in monomial if not isinstance(v, str)]
        if not atoms:
            continue
        if len(monomial) > 1:
            if coefficient < 0 or not all(Polynomial.variable(a).is_natural for a in atoms):
                return False
            continue
        (atom,) = atoms
        factor = Polynomial.constant(coefficient)
        rest = size - factor * Polynomial.variable(atom)
        if isinstance(atom, Minimum):
            each = (rest + factor * operand for operand in atom.operands)
            return (all if coefficient > 0 else any)(p.is_natural for p in each)
        factor = Polynomial.constant(coefficient / atom.below)
        exact = rest + factor * atom.over
        if coefficient < 0:
            return exact.is_natural
        lost = factor * Polynomial.constant(atom.below - 1)
        return (atom.over.is_natural and rest.is_natural) or (exact - lost).is_natural
    return all(coefficient >= 0 for _, coefficient in size.terms)


def maximum(*sizes: Polynomial) -> Polynomial:
    """Returns the greatest of several sizes, as a polynomial of a minimum."""
    minus = Polynomial.constant(-1)
    return minus * minimum(*(minus * size for size in sizes))


def is_less(a: Polynomial, b: Polynomial) -> Polynomial:
    """Returns a closed form that is 1 where a < b, else 0. Both must be integers at all sizes."""
    return minimum(maximum(b - a, Polynomial.constant(0)), Polynomial.constant(1))


def without(size: Polynomial, factor: Monomial) -> Polynomial | None:
    """Returns size / factor, where `factor` is a product of variables; None if a term lacks one of
    them."""
    terms = []
    for monomial, coefficient in size.terms:
        rest = list(monomial)
        for variable in factor:
            if variable not in rest:
                return None
            rest.remove(variable)
        terms.append((tuple(rest), coefficient))
    return Polynomial(tuple(terms))


def symbols_of(atom: Atom) -> tuple[str, ...]:
    """Returns the symbols on which a quotient or minimum depends, sorted."""
    return tuple(sorted({s for operand in atom.operands for s in operand.variables}))


def _alternatives(size: Polynomial) -> list[Polynomial]:
    """Returns sizes whose minimum is `size`: min(a, b) + c gives [a + c, b + c]; a size without a
    minimum, or a long one, gives itself alone. For merging nested minima."""
    for monomial, coefficient in size.terms if size.weight <= _LARGEST_MERGED else ():
        if len(monomial) == 1 and isinstance(monomial[0], Minimum) and coefficient > 0:
            rest = size - _polynomial([(monomial, coefficient)])
            each = (
                _polynomial((m, c * coefficient) for m, c in operand.terms)
                for operand in monomial[0].operands
            )
            return [found for operand in each for found in _alternatives(rest + operand)]
    return [size]


def _value(variable: Variable, binding: Binding) -> int:
    return binding[variable] if isinstance(variable, str) else variable.at(binding)


def _polynomial(terms: Iterable[tuple[Monomial, Fraction]]) -> Polynomial:
    sums: dict[Monomial, Fraction] = {}
    for monomial, coefficient in terms:
        sums[monomial] = sums.get(monomial, Fraction(0)) + coefficient
    kept = [(m, c) for m, c in sums.items() if c]
    return Polynomial(tuple(sorted(kept, key=lambda t: (-len(t[0]), tuple(map(str, t[0]))))))


def _parsed(node: ast.expr) -> Polynomial:
    """Returns the polynomial of a parsed Python expression. Errors: ValueError if it is not a
    size."""
    if isinstance(node, ast.Name):
        return Polynomial.variable(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Polynomial.constant(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return Polynomial.constant(-1) * _parsed(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        inner, *others = map(_parsed, node.args)
        if node.func.id == "min":
            return minimum(inner, *others)
        if node.func.id == "max":
            return maximum(inner, *others)
        if node.func.id == "floor" and not others:
            return quotient(inner, 1)
        if node.func.id == "ceil" and not others:
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
