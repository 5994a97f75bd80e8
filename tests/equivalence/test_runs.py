"""Runs move as NumPy moves the numbers one by one."""

from __future__ import annotations

import numpy as np
import pytest

from onnxpar.equivalence.runs import Runs
from onnxpar.equivalence.spans import places_of


def spans(rng: np.random.Generator, size: int) -> np.ndarray:
    """Some positions of a dimension: all, a range, a few in any order, or none."""
    start, stop = sorted(rng.integers(0, size + 1, 2))
    ways = [
        np.arange(size),
        np.arange(start, stop),
        rng.permutation(size)[: rng.integers(size + 1)],
    ]
    return ways[rng.integers(3)]


@pytest.mark.parametrize("seed", range(200))
def test_moves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 5, rng.integers(1, 4)).tolist())
    held = [spans(rng, size) for size in shape]
    numbers = places_of(held, shape) + 1000
    runs = Runs.at(held, shape, 1000)
    assert np.array_equal(runs.numbers, numbers) and runs.same(Runs.of(numbers))
    own = runs.spans(shape, 1000)
    assert own is not None
    if numbers.size:
        assert all(np.array_equal(a, b) for a, b in zip(own, held, strict=True))
    axis = int(rng.integers(len(shape)))
    start, stop = sorted(rng.integers(0, numbers.shape[axis] + 1, 2).tolist())
    part = np.take(numbers, range(start, stop), axis)
    cut = runs.cut(axis, start, stop)
    assert np.array_equal(cut.numbers, part) and cut.same(Runs.of(part))
    joined = Runs.join([cut, runs, cut], axis)
    assert np.array_equal(joined.numbers, np.concatenate([part, numbers, part], axis))
    flat = joined.reshape((joined.numbers.size,))
    assert np.array_equal(flat.numbers, joined.numbers.reshape(-1))


def test_other_numbers_are_no_positions() -> None:
    assert Runs.of(np.array([[0, 1], [3, 2]])).spans((2, 2), 0) is None
    assert Runs.of(np.array([[0, 1], [2, 2]])).spans((2, 2), 0) is None
    assert Runs.of(np.array([0, 1, 2, 3])).spans((2, 2), 0) is None
    with pytest.raises(ValueError, match="not the shape"):
        Runs.of(np.arange(4)).reshape((5,))
    with pytest.raises(ValueError, match="positions 0 to 5"):
        Runs.of(np.arange(4)).cut(0, 0, 5)
    with pytest.raises(ValueError, match="other dimensions"):
        Runs.join([Runs.of(np.zeros((2, 2), int)), Runs.of(np.zeros((2, 3), int))], 0)
    with pytest.raises(ValueError, match="no dimension 1"):
        Runs.join([Runs.of(np.arange(4))], 1)
