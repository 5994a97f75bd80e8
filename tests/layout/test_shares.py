"""Sizes of shards in proportion to shares, compared with the best of all divisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar.layout.shares import (
    Proportion,
    Shares,
    apportioned,
    integer_weights,
    most_weight,
)

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


@given(st.lists(st.integers(1, 16), min_size=1, max_size=6), st.integers(0, 500))
def test_a_proportion_rounds_each_bound(weights: list[int], size: int) -> None:
    found = Proportion(tuple(weights))
    sizes = found.sizes(size)
    assert sum(sizes) == size and min(sizes) >= 0
    for at in range(len(weights) + 1):
        assert found.bound(size, at) == sum(sizes[:at])
        exact = size * sum(weights[:at]) / sum(weights)
        assert abs(found.bound(size, at) - exact) <= 0.5


@given(st.lists(st.integers(1, 9), min_size=6, max_size=6), st.integers(0, 200))
def test_proportions_over_more_axes_lie_within_those_over_fewer(
    weights: list[int], size: int
) -> None:
    many = Proportion(tuple(weights)).sizes(size)
    few = Proportion(tuple(sum(weights[i : i + 3]) for i in (0, 3))).sizes(size)
    assert few == (sum(many[:3]), sum(many[3:]))


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=12))
def test_integer_weights(shares: list[float]) -> None:
    weights = integer_weights(shares)
    count = sum(weights)
    assert min(weights) >= 1 and count <= most_weight(len(shares))
    total = sum(shares)
    for weight, share in zip(weights, shares, strict=True):
        assert weight == 1 or abs(weight - count * share / total) <= len(shares)


@pytest.mark.parametrize(
    ("shares", "weights"),
    [
        ((0.75, 0.25), (3, 1)),
        ((0.9, 0.1), (9, 1)),
        ((0.5, 1 / 6, 1 / 3), (3, 1, 2)),
        ((0.99, 0.01), (15, 1)),
        ((0.25,) * 4, (1, 1, 1, 1)),
    ],
)
def test_weights_are_the_smallest_exact_ones(
    shares: tuple[float, ...], weights: tuple[int, ...]
) -> None:
    assert integer_weights(shares) == weights
