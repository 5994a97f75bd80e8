"""Eliminating variables finds what trying every combination finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpar.search.elimination import Table, TooLarge, exhaust, minimize


def brute_force(sizes: list[int], tables: list[Table]) -> float:
    everything = itertools.product(*map(range, sizes))
    return min(
        sum(float(t.values[tuple(x[v] for v in t.scope)]) for t in tables) for x in everything
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Table]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    tables = []
    for _ in range(draw(st.integers(0, 8))):
        scope = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=3))
        values = random.integers(0, 9, [sizes[v] for v in scope]).astype(float)
        values[random.random(values.shape) < draw(st.sampled_from([0, 0.3]))] = np.inf
        tables.append(Table(tuple(scope), values))
    return sizes, tables


@settings(deadline=None, max_examples=300)
@given(problems())
def test_as_brute_force(problem: tuple[list[int], list[Table]]) -> None:
    sizes, tables = problem
    least, chosen = minimize(sizes, tables)
    assert least == brute_force(sizes, tables)
    assert exhaust(sizes, tables)[0] == least
    assert len(chosen) == len(sizes)
    assert least == sum(float(t.values[tuple(chosen[v] for v in t.scope)]) for t in tables)


def test_a_long_chain() -> None:
    random = np.random.default_rng(0)
    tables = [Table((i, i + 1), random.random((25, 25))) for i in range(1000)]
    least, chosen = minimize([25] * 1001, tables)
    best = np.zeros(25)
    for table in tables:
        best = (best[:, None] + table.values).min(axis=0)
    assert least == pytest.approx(best.min(), rel=1e-12)
    total = sum(t.values[chosen[i], chosen[i + 1]] for i, t in enumerate(tables))
    assert total == pytest.approx(least, rel=1e-12)


def test_what_depends_on_too_much_is_refused() -> None:
    pairs = itertools.combinations(range(8), 2)
    tables = [Table(pair, np.zeros((10, 10))) for pair in pairs]
    with pytest.raises(TooLarge, match="100000000 entries over 8 variables"):
        minimize([10] * 8, tables)
    with pytest.raises(TooLarge, match="100000000 combinations of 8 variables"):
        exhaust([10] * 8, tables)
