"""Column generation and the integer program find what trying every assignment finds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar.base.arrays import Array
from onnxpar.search.solver.column_generation import NEAR, minimize_within
from onnxpar.search.solver.elimination import Table, minimize
from onnxpar.search.solver.limits import Demand, Limit, TooMuch

Values = Sequence[int]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[list[Table]], list[Demand], int]:
    """Up to five variables, one sum or two, with what is held at up to six steps."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    variables = st.lists(st.integers(0, len(sizes) - 1), max_size=3)
    number = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(number)

    def table(scope: list[int], holes: float) -> Table:
        values = rng.choice([1.0, 2.0, 10.0], [sizes[v] for v in scope]) * rng.random()
        return Table(tuple(scope), np.where(rng.random(values.shape) < holes, np.inf, values))

    count, steps = draw(st.integers(1, 2)), draw(st.integers(1, 6))
    holes = draw(st.sampled_from([0.0, 0.1, 0.4]))
    sums = [[table(s, holes) for s in draw(st.lists(variables, min_size=1))] for _ in range(count)]
    demands = []
    for scope in draw(st.lists(variables, min_size=1, max_size=6)):
        shape = [sizes[v] for v in scope]
        spans = np.sort(rng.integers(0, steps, (rng.integers(1, 3), 2)), axis=1)
        demands.append(Demand(Table(tuple(scope), rng.integers(0, 50, shape).astype(float)), spans))
    return sizes, sums, demands, steps


def total(tables: Sequence[Table], values: Values) -> float:
    return float(sum(t.values[tuple(values[v] for v in t.scope)] for t in tables))


def held(demands: Sequence[Demand], steps: int, values: Values) -> Array:
    found: Array = np.zeros(steps)
    for demand in demands:
        for first, last in demand.spans:
            found[first : last + 1] += total([demand.table], values)
    return found


def least(sizes: Values, tables: Sequence[Table]) -> tuple[float, list[int], float]:
    found, values = minimize(sizes, tables)
    return found, values, found


@given(problems(), st.floats(0, 1.2))
def test_nothing_within_the_limit_is_less(
    problem: tuple[list[int], list[list[Table]], list[Demand], int], share: float
) -> None:
    sizes, sums, demands, steps = problem
    everything = [
        v for v in product(*map(range, sizes)) if all(math.isfinite(total(s, v)) for s in sums)
    ]
    if not everything:
        limit = Limit(1.0, steps, demands)
        assert math.isinf(minimize_within(sizes, sums, limit, lambda t: least(sizes, t))[0])
        return
    peaks = sorted({float(held(demands, steps, v).max()) for v in everything})
    most = max(peaks[min(int(share * len(peaks)), len(peaks) - 1)] - (share == 0), 0.5)
    fitting = [v for v in everything if held(demands, steps, v).max() <= most]
    expected = min((max(total(s, v) for s in sums) for v in fitting), default=None)
    limit = Limit(most, steps, demands)
    try:
        value, values, bound = minimize_within(
            sizes, sums, limit, lambda tables: least(sizes, tables)
        )
    except TooMuch as error:
        assert expected is None
        assert error.least <= peaks[0] * (1 + 1e-9)
        return
    assert expected is not None
    assert bound <= expected * (1 + 1e-9)
    assert expected * (1 - 1e-9) <= value <= expected * (1 + NEAR) + 1e-9
    assert max(total(s, values) for s in sums) == pytest.approx(value, rel=1e-9)
    assert held(demands, steps, values).max() <= most
