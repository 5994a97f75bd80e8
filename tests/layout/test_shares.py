"""Sizes of shards in proportion to shares, compared with the best of all divisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar.layout.shares import Shares, apportioned

WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4)


def divisions(size: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide elements into so many parts of at least this size."""
    if count == 1:
        yield (size,)
        return
    for first in range(least, size - least * (count - 1) + 1):
        yield from ((first, *rest) for rest in divisions(size - first, count - 1, least))


def slowest(parts: Sequence[int], weights: Sequence[float]) -> float:
    return max(part / weight for part, weight in zip(parts, weights, strict=True))


@given(WEIGHTS, st.integers(0, 12))
def test_no_division_is_faster(weights: list[float], size: int) -> None:
    parts = apportioned(size, weights)
    least = int(size >= len(weights))
    assert sum(parts) == size and min(parts) >= least
    best = min(slowest(each, weights) for each in divisions(size, len(weights), least))
    assert slowest(parts, weights) <= best * (1 + 1e-9)


@given(st.lists(st.floats(0.05, 1.0), min_size=12, max_size=12), st.integers(24, 500))
def test_shards_over_more_axes_lie_within_those_over_fewer(weights: list[float], size: int) -> None:
    """So a gather over the last axes only joins neighbours."""
    fine = Shares((3, 4), tuple(weights)).sizes(size)
    coarse = [sum(weights[i : i + 4]) for i in range(0, 12, 4)]
    assert sum(fine) == size and min(fine) >= 1
    if min(Shares((3,), tuple(coarse)).sizes(size)) >= 4:
        joined = tuple(sum(fine[i : i + 4]) for i in range(0, 12, 4))
        assert joined == Shares((3,), tuple(coarse)).sizes(size)


@pytest.mark.parametrize(
    ("size", "weights", "sizes"),
    [
        (512, (3.0, 1.0), (384, 128)),
        (4, (3.0, 1.0), (3, 1)),
        (2, (100.0, 1.0), (1, 1)),  # at least one, if there are enough
        (1, (1.0, 100.0), (0, 1)),
        (9, (3.0, 1.0, 2.0), (5, 1, 3)),
        (0, (3.0, 1.0), (0, 0)),
    ],
)
def test_examples(size: int, weights: tuple[float, ...], sizes: tuple[int, ...]) -> None:
    assert Shares((len(weights),), weights).sizes(size) == sizes
