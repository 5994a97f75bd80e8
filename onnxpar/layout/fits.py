"""Finds closed forms of sizes from their values at samples.

The shapes of a model with open sizes are inferred for several bindings (a binding gives every
symbol a size). A size that differs between bindings depends on symbols; its closed form is the
simplest polynomial of the symbols that gives the right size at every binding. All passes of the
compiler work with the numbers of the first binding; the other bindings only serve to find closed
forms.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from onnxpar.layout.symbols import Binding, Monomial, Polynomial, Variable, minimum, symbols_of

FEWEST, MOST = 6, 32
"""Bounds of the number of bindings (without the FAR ones) that a polynomial must agree with.
Between these bounds, there are as many bindings as ranks, so that sizes take every remainder modulo
the number of ranks."""
FAR = 2
"""Number of additional bindings with much larger sizes, at which a size changes that only looks
constant at small ones (a minimum)."""
ENOUGH = 5
"""Bindings at which the model is not valid are dropped; at least this many must remain."""
MOST_MONOMIALS = 1 << 14
"""With more monomials, sums of two are not tried, and a size that needs such a sum has no closed
form."""
_DEGREE = 3
_FEWEST_ROWS = 4
"""A linear fit counts only if the variable has at least this many different values, so that it is
no coincidence; a fit in two variables needs more."""
_TRIES = 100


@dataclass(frozen=True)
class Domain:
    """The sizes from which samples of a symbol are drawn: n * `step` + `offset` for n from `low` to
    `high`. Samples are consecutive n in random order, and FAR much larger ones.

    closed  the symbol has no sizes outside the domain, so that there are no much larger samples
    """

    step: int
    low: int
    high: int
    offset: int = 0
    closed: bool = False

    def size(self, n: int) -> int:
        """Returns the size for n, counted from 0: n * `step` + `offset`."""
        return n * self.step + self.offset


DOMAINS = (Domain(1, 11, 60), Domain(1, 4, 16))
"""Domains to try, in this order. A model with a short table of positions may be valid only at the
smaller sizes of the second one."""


def sample(
    domains: Mapping[str, Domain], least: int, taken: Iterable[int], remainders: int = 0
) -> list[Binding]:
    """Returns the bindings (a size for every symbol) for which the shapes of a model are inferred.
    The sizes of one symbol are consecutive, so that they have every remainder; the sizes within a
    binding differ from each other. The last FAR bindings have much larger sizes.

    domains     the domain of each symbol, from which its sizes are drawn
    least       the smallest size
    taken       sizes that the first binding avoids if possible, such as constants of the model
    remainders  a number of ranks: at least as many bindings are returned, up to MOST, and sizes are
                at least as large where a domain has room for that, so that no shard is empty
    """
    source = random.Random(0)
    count = min(max(FEWEST, least, remainders), MOST)
    rows: list[tuple[int, ...]] = []
    for _ in range(_TRIES):
        columns = []
        for domain in domains.values():
            if domain.closed:
                few = min(max(domain.low, 2), domain.high)  # at 1, rules see no dimension
                last = domain.high - count + 1
                start = source.randint(min(max(domain.low, least), last), max(domain.low, last))
                within = range(max(start, few), min(start + count, domain.high + 1))
                drawn = source.sample(within, len(within))
                more = count + FAR - len(drawn)
                drawn += [source.randint(few, domain.high) for _ in range(more)]
                columns.append(drawn)
                continue
            low = max(domain.low, -(-least // domain.step), min(remainders, domain.high - count))
            start = source.randint(low, max(low, domain.high - count))
            drawn = source.sample(range(start, start + count), count)
            drawn += [start + count * source.randint(8, 40) for _ in range(FAR)]
            columns.append([domain.size(n) for n in drawn])
        rows = list(zip(*columns, strict=True))
        if all(len(set(row)) == len(domains) for row in rows):
            break
    rows = rows if domains else [()] * (count + FAR)
    busy = set(taken)
    near, far = rows[:count], rows[count:]
    near.sort(key=lambda row: len(busy.intersection(row)))
    return [dict(zip(domains, row, strict=True)) for row in [*near, *far]]


def fit(values: Sequence[int], variables: Mapping[Variable, Sequence[int]]) -> Polynomial | None:
    """Returns the simplest polynomial that has these values; None if there is none. `fit([3, 5, 9,
    11, 13], {"n": [1, 2, 4, 5, 6]})` is 2*n + 1.

    values     the values to fit, one per sample
    variables  the value of each variable at the same samples

    A polynomial has at most three terms, one of them a number. There must be more samples than
    terms, so that a fit is no coincidence.
    """
    return next(iter(fits(values, variables)), None)


def fits(
    values: Sequence[int], variables: Mapping[Variable, Sequence[int]]
) -> tuple[Polynomial, ...]:
    """Returns all polynomials with these values that have as few terms as possible, the simplest
    first."""
    return _fits(tuple(values), tuple((n, tuple(v)) for n, v in variables.items()))


@lru_cache(maxsize=65536)
def _fits(
    values: tuple[int, ...], variables: tuple[tuple[Variable, tuple[int, ...]], ...]
) -> tuple[Polynomial, ...]:
    """`fits` with hashable arguments, so that results are cached."""
    if len(set(values)) == 1:
        return (Polynomial.constant(values[0]),)
    columns = _monomials(variables)
    lines = [
        (m, line)
        for m, column in columns.items()
        if (line := line_through(values, column))
        and (line == (Fraction(1), Fraction(0)) or len(set(column)) >= _FEWEST_ROWS)
    ]
    multiples = tuple(_sum([(m, a)]) for m, (a, b) in lines if b == 0)
    if multiples:
        return _sorted(multiples)
    if lines:
        return _sorted([_sum([(m, a), ((), b)]) for m, (a, b) in lines])
    found = _minima(values, dict(variables))
    if found:
        return _sorted(found)
    for m, n in _likely_pairs(values, columns):
        plane = _plane(values, columns[m], columns[n])
        if plane and len(set(zip(columns[m], columns[n], strict=True))) > _FEWEST_ROWS:
            found.append(_sum([(m, plane[0]), (n, plane[1]), ((), plane[2])]))
    return _sorted(found)


def _minima(
    values: tuple[int, ...], variables: Mapping[Variable, tuple[int, ...]]
) -> list[Polynomial]:
    """Returns the closed forms min(v, c) and min(v, w) with these values, where v and w are
    variables and c is the largest of the values."""
    most = max(values)
    if values.count(most) < 2 or len(set(values)) < _FEWEST_ROWS - 1:
        return []
    each = [(Polynomial.variable(v), column) for v, column in variables.items()]
    each = [(p, c) for p, c in each if all(a <= b for a, b in zip(values, c, strict=True))]
    bounds = [*each, (Polynomial.constant(most), (most,) * len(values))]
    return [
        minimum(a, b)
        for (a, x), (b, y) in itertools.combinations(bounds, 2)
        if tuple(map(min, x, y)) == values
    ]


def _sum(terms: Sequence[tuple[Monomial, Fraction]]) -> Polynomial:
    total = Polynomial(())
    for monomial, coefficient in terms:
        if coefficient:
            total = total + Polynomial(((monomial, coefficient),))
    return total


def _sorted(found: Sequence[Polynomial]) -> tuple[Polynomial, ...]:
    """Sorts polynomials from simple to complex: by denominator, degree, and number of quotients and
    minima."""

    def weight(polynomial: Polynomial) -> tuple[int, int, int]:
        degree = max(len(monomial) for monomial, _ in polynomial.terms)
        return polynomial.denominator, degree, len(polynomial.atoms)

    return tuple(sorted(found, key=weight))


@lru_cache(maxsize=256)
def _monomials(
    variables: tuple[tuple[Variable, tuple[int, ...]], ...],
) -> dict[Monomial, tuple[int, ...]]:
    """Returns monomials up to degree _DEGREE with their values at the samples, the simplest first;
    monomials that have the same value at all samples are left out."""
    out: dict[Monomial, tuple[int, ...]] = {}
    ordered = sorted(variables, key=lambda v: (not isinstance(v[0], str), str(v[0])))
    for degree in range(1, _DEGREE + 1):
        for chosen in itertools.combinations_with_replacement(ordered, degree):
            names = tuple(name for name, _ in chosen)
            column = tuple(math.prod(row) for row in zip(*(v for _, v in chosen), strict=True))
            if len(set(column)) > 1 and _is_sensible(names):
                out[tuple(sorted(names, key=str))] = column
    return out


def _is_sensible(names: Monomial) -> bool:
    """True unless the monomial multiplies a quotient or minimum with a symbol inside it, such as `n
    * (n // 2)`."""
    for name in set(names):
        if not isinstance(name, str):
            own = set(symbols_of(name))
            others = [n for n in names if n != name]
            if any(own & set(Polynomial.variable(n).variables) for n in others):
                return False
    return True


def line_through(values: Sequence[int], column: Sequence[int]) -> tuple[Fraction, Fraction] | None:
    """Returns integers (a, b) with values == a * column + b at all samples; None if there are none,
    or if a is 0."""
    other = next(i for i, c in enumerate(column) if c != column[0])
    slope, rest = divmod(values[other] - values[0], column[other] - column[0])
    base = values[0] - slope * column[0]
    right = not rest and all(slope * c + base == v for v, c in zip(values, column, strict=True))
    return (Fraction(slope), Fraction(base)) if right and slope else None


def _likely_pairs(
    values: tuple[int, ...], columns: Mapping[Monomial, tuple[int, ...]]
) -> list[tuple[Monomial, Monomial]]:
    """Returns the pairs (m, n) of monomials for which values == x*m + y*n + z is possible. Computed
    in double precision, to rule out most pairs quickly before exact arithmetic."""
    names = list(columns)
    if len(names) < 2 or len(values) < 3:
        return list(itertools.combinations(names, 2))
    if len(names) > MOST_MONOMIALS:
        return []
    grid = np.array([columns[n] for n in names], np.float64)
    grid, target = grid[:, 1:] - grid[:, :1], np.array(values[1:], np.float64) - values[0]
    likely: list[tuple[Monomial, Monomial]] = []
    for i, own in enumerate(grid[:-1]):  # row by row: all pairs at once would take gigabytes
        others = grid[i + 1 :]
        with np.errstate(all="ignore"):
            below = own[0] * others[:, 1] - own[1] * others[:, 0]
            x = (target[0] * others[:, 1] - target[1] * others[:, 0]) / below
            y = (own[0] * target[1] - own[1] * target[0]) / below
            made = x * own[-1] + y * others[:, -1]
            bound = np.abs(x) * np.abs(own).max() + np.abs(y) * np.abs(others).max(1)
            near = np.abs(made - target[-1]) <= 1e-6 * bound + 1e-6
        likely += [(names[i], names[i + 1 + j]) for j in np.flatnonzero((below == 0) | near)]
    return likely


def _plane(
    values: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[Fraction, Fraction, Fraction] | None:
    """Returns (x, y, z) with values == x * a + y * b + z at all samples, where x and y are integers
    other than 0; None if there are none."""
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
