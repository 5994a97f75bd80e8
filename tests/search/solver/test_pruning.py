"""What is left out is in no smaller sum, and what is said to be the least is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search.small_sums import Sum, every_total, sums, total

from onnxpar.search.solver import pruning
from onnxpar.search.solver.elimination import Table, diagonal, minimize
from onnxpar.search.solver.message_passing import Messages
from onnxpar.search.solver.pruning import Start, minimize_in_parts


def given_values(values: Mapping[int, int]) -> Start:
    """Starts with these values."""
    return lambda *_: values


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables of few entries are large, so that bounds must do."""
    monkeypatch.setattr(pruning, "FEW", 1)
    monkeypatch.setattr(pruning, "SMALL", 4**3)
    monkeypatch.setattr(pruning, "LARGE", 4**4)
    yield


@given(sums(20))
def test_bounds(problem: Sum) -> None:
    """Costs that move leave every sum as it was, and none is below its bound."""
    sizes, tables = problem
    own = [Table((v,), np.zeros(size)) for v, size in enumerate(sizes)]
    messages = Messages([diagonal(t) for t in tables if t.scope] + own, 0.0)
    messages.sweep(2)
    everything = every_total(sizes, [t for t in tables if t.scope])
    moved = messages.bound + every_total(sizes, messages.tables)
    assert messages.bound <= everything.min() + 1e-9
    if math.isfinite(messages.bound):
        assert np.allclose(moved, everything, atol=1e-9)
        assert all((t.values >= -1e-9).all() for t in messages.tables)
        for variable, slack in messages.slack().items():
            least = everything.min(axis=tuple(v for v in range(len(sizes)) if v != variable))
            assert (messages.bound + slack <= least + 1e-9).all()


@given(sums(20))
def test_as_brute_force(problem: Sum) -> None:
    sizes, tables = problem
    found, values, bound = minimize_in_parts(sizes, tables, given_values({}))
    least = every_total(sizes, tables).min()
    assert found == total(tables, values)
    assert found >= least >= bound * (1 - 1e-12)


@given(sums(20), st.floats(0.5, 1.5))
def test_what_is_not_below_a_number_is_left(problem: Sum, share: float) -> None:
    """The least sum is found if it is below the number; else the bound says that none is."""
    sizes, tables = problem
    least = every_total(sizes, tables).min()
    below = share * least if math.isfinite(least) else 1.0
    found, _, bound = minimize_in_parts(sizes, tables, given_values({}), below)
    assert bound <= least + 1e-9
    assert found >= least
    if bound >= min(found, below) - 1e-9 * abs(below):
        assert found <= least + 1e-9 or least >= below - 1e-9


def grid(side: int, values: int, seed: int) -> Sum:
    """Variables in a square, of which neighbours like to be alike."""
    random = np.random.default_rng(seed)
    number = np.arange(side * side).reshape(side, side)
    pairs = [*zip(number[:, 1:].flat, number[:, :-1].flat, strict=True)]
    pairs += [*zip(number[1:].flat, number[:-1].flat, strict=True)]
    tables = [Table((v,), random.random(values)) for v in range(side * side)]
    alike = 1 - np.eye(values)
    tables += [Table((int(a), int(b)), 0.3 * random.random() * alike) for a, b in pairs]
    return [values] * side * side, tables


@pytest.mark.parametrize("seed", range(5))
def test_a_grid_is_solved_by_what_is_left_out(seed: int) -> None:
    sizes, tables = grid(7, 4, seed)
    found, values, bound = minimize_in_parts(sizes, tables, given_values({}))
    assert bound == found
    assert found == pytest.approx(minimize(sizes, tables)[0], rel=1e-12)
    assert found == pytest.approx(total(tables, values), rel=1e-12)


def dense(seed: int, variables: int = 6, values: int = 8) -> Sum:
    """Variables that all depend on each other."""
    draw = np.random.default_rng(seed)
    pairs = itertools.combinations(range(variables), 2)
    return [values] * variables, [Table(p, draw.random((values, values))) for p in pairs]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_out_is_in_no_smaller_sum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all that is found at first is far from the least."""
    monkeypatch.setattr(pruning, "SMALL", 1)
    monkeypatch.setattr(pruning, "LARGE", 4**5)
    sizes, tables = dense(seed, variables=5, values=4)
    found, _, bound = minimize_in_parts(sizes, tables, given_values({}))
    assert bound == found
    assert found == pytest.approx(every_total(sizes, tables).min(), rel=1e-12)


def test_where_the_least_is_out_of_reach_little_is_found() -> None:
    gaps = []
    for seed in range(10):
        sizes, tables = dense(seed)
        found, values, bound = minimize_in_parts(
            sizes, tables, given_values(dict.fromkeys(range(6), 0))
        )
        assert bound < found and bound <= minimize(sizes, tables)[0]
        assert found == pytest.approx(total(tables, values))
        gaps.append(found / minimize(sizes, tables)[0])
    assert min(gaps) >= 1 - 1e-12 and np.median(gaps) < 1.25 and max(gaps) < 1.5


def test_where_nothing_is_found_there_is_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that all must differ, and of which none is better than others."""
    monkeypatch.setattr(pruning, "SMALL", 1)
    monkeypatch.setattr(pruning, "LARGE", 1)
    differ = np.where(np.eye(8), np.inf, 1.0)
    tables = [Table(pair, differ) for pair in itertools.combinations(range(6), 2)]
    assert minimize_in_parts([8] * 6, tables, given_values({0: 0, 1: 1, 2: 2, 3: 3}))[0] == 15
    found, _, bound = minimize_in_parts([8] * 6, tables, given_values({0: 0, 1: 0}))
    assert math.isinf(found) and bound <= 15


def test_nothing_is_found_above_the_start() -> None:
    for seed in range(5):
        sizes, tables = dense(seed)
        least, best = minimize(sizes, tables)
        found, _, _ = minimize_in_parts(sizes, tables, given_values(dict(enumerate(best[:4]))))
        assert found == pytest.approx(least, rel=1e-12)
