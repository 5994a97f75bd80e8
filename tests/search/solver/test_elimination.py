"""Eliminating variables finds what trying every combination finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from search.small_sums import Sum, every_total, sums, total

from onnxpar.search.solver.elimination import (
    Elimination,
    Table,
    TooLarge,
    every_sum,
    minimize,
    order_within,
)


@given(sums())
def test_as_brute_force(problem: Sum) -> None:
    sizes, tables = problem
    least, chosen = minimize(sizes, tables)
    assert least == every_total(sizes, tables).min()
    assert every_sum(sizes, tables).min() == least
    assert len(chosen) == len(sizes)
    assert least == total(tables, chosen)


@given(sums())
def test_what_is_left_has_the_same_sums(problem: Sum) -> None:
    sizes, tables = problem
    elimination = Elimination(sizes, tables)
    elimination.follow(order_within(16, sizes, [table.scope for table in tables]))
    left = sorted(elimination.left)
    others = tuple(v for v in range(len(sizes)) if v not in elimination.left)
    least = every_total(sizes, tables).min(axis=others)
    for values in itertools.product(*(range(sizes[v]) for v in left)):
        known = dict(zip(left, values, strict=True))
        rest = [known.get(v, 0) for v in range(len(sizes))]
        assert elimination.constant + total(elimination.tables.values(), rest) == least[values]
        assert total(tables, elimination.decide(known)) == least[values]


def test_a_long_chain() -> None:
    random = np.random.default_rng(0)
    tables = [Table((i, i + 1), random.random((25, 25))) for i in range(1000)]
    least, chosen = minimize([25] * 1001, tables)
    best = np.zeros(25)
    for table in tables:
        best = (best[:, None] + table.values).min(axis=0)
    assert least == pytest.approx(best.min(), rel=1e-12)
    assert total(tables, chosen) == pytest.approx(least, rel=1e-12)


def test_what_depends_on_too_much_is_refused() -> None:
    pairs = itertools.combinations(range(8), 2)
    tables = [Table(pair, np.zeros((10, 10))) for pair in pairs]
    with pytest.raises(TooLarge, match="8 variables need tables of over 1048576 entries"):
        minimize([10] * 8, tables)
    with pytest.raises(TooLarge, match="100000000 combinations of 8 variables"):
        every_sum([10] * 8, tables)


def test_no_table_grows_unless_it_stays_small() -> None:
    """A chain shrinks from its ends, a star only from its leaves."""
    pairs = itertools.combinations(range(4), 2)
    dense = [Table(pair, np.zeros((5, 5))) for pair in pairs]
    chain = [Table((i, i + 1), np.zeros((5, 5))) for i in range(3, 9)]
    elimination = Elimination([5] * 10, [*dense, *chain])
    elimination.run(1 << 20, growth=124)
    assert elimination.left == {0, 1, 2, 3}
    elimination.run(1 << 20, growth=125)
    assert not elimination.left
