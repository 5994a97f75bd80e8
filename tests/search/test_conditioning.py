"""Where the least is out of reach, rounds lead close to it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from onnxpar.search import conditioning
from onnxpar.search.conditioning import minimize_in_parts
from onnxpar.search.elimination import Table, minimize
from onnxpar.search.orders import cutset, elimination_order


def dense(variables: int, values: int, seed: int) -> tuple[list[int], list[Table]]:
    """Variables that all depend on each other."""
    draw = np.random.default_rng(seed)
    pairs = combinations(range(variables), 2)
    return [values] * variables, [Table(p, draw.random((values, values))) for p in pairs]


def test_what_is_kept_makes_the_rest_small() -> None:
    sizes, tables = dense(12, 8, 0)
    scopes = [table.scope for table in tables]
    order, entries = elimination_order(sizes, scopes)
    assert sorted(order) == list(range(12)) and entries == pytest.approx(8**12)
    assert len(cutset(sizes, scopes, order, 8**8)) == 4
    assert cutset(sizes, scopes, order, 8**12) == []


def test_rounds_lead_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditioning, "LIMIT", 8**3)
    monkeypatch.setattr(conditioning, "ROUND", 8**3)
    gaps = []
    for seed in range(10):
        sizes, tables = dense(6, 8, seed)
        least, _ = minimize(sizes, tables)
        start = dict.fromkeys(range(6), 0)
        first = sum(float(t.values[0, 0]) for t in tables)
        total, values, is_least = minimize_in_parts(sizes, tables, start)
        assert not is_least
        again = sum(float(t.values[tuple(values[v] for v in t.scope)]) for t in tables)
        assert total == pytest.approx(again)
        assert least * (1 - 1e-12) <= total < first
        gaps.append(total / least)
    assert np.median(gaps) < 1.25 and max(gaps) < 1.5


def test_few_cases_are_all_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditioning, "LIMIT", 8**4)
    for seed in range(5):
        sizes, tables = dense(6, 8, seed)
        total, values, is_least = minimize_in_parts(sizes, tables, {})
        assert is_least and total == pytest.approx(minimize(sizes, tables)[0])
        again = sum(float(t.values[tuple(values[v] for v in t.scope)]) for t in tables)
        assert total == pytest.approx(again)
