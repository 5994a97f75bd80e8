"""What the ranks of a ring compute: all that queries see, nothing twice, and all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxpar.rules.ring_ranges import seen_range, zigzag

CAUSAL = {"is_causal": 1}
ATTRS: list[dict[str, Any]] = [
    CAUSAL,
    {"left_window_size": 3},
    {"left_window_size": 2, "right_window_size": 4},
    {"left_window_size": 5, "is_causal": 1},
]


def sees(attrs: dict[str, Any], size: int) -> Any:
    """By the definition of Attention: a matrix of the keys (columns) that each query sees."""
    row, column = np.arange(size)[:, None], np.arange(size)
    found = np.ones((size, size), bool)
    if attrs.get("is_causal"):
        found &= column <= row
    if "left_window_size" in attrs:
        found &= column >= row - attrs["left_window_size"]
    if "right_window_size" in attrs:
        found &= column <= row + attrs["right_window_size"]
    return found


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("attrs", ATTRS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_pair_that_sees_each_other_is_computed_once(
    ranks: int, attrs: dict[str, Any], balanced: bool
) -> None:
    size = 19
    parts = zigzag(size, ranks) if balanced else np.array_split(np.arange(size), ranks)
    visible = sees(attrs, size)
    computed = np.zeros((size, size), int)
    for i, queries in enumerate(parts):
        for step in range(ranks):
            keys = parts[(i - step) % ranks]
            found = seen_range(attrs, queries, keys, step == 0)
            block = np.ix_(queries[slice(*found.queries)], keys[slice(*found.keys)])
            computed[block] += 1
            assert found.is_full <= visible[block].all()
    assert (computed[visible] == 1).all() and computed.max() == 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_zigzag_gives_all_ranks_half_of_each_block(ranks: int) -> None:
    """Without it, in each step some rank computes a whole block, and others none."""
    size = 2 * ranks * 6

    def work(parts: list[Any]) -> list[list[int]]:
        found = []
        for step in range(1, ranks):
            ranges = [seen_range(CAUSAL, q, parts[(i - step) % ranks]) for i, q in enumerate(parts)]
            found.append([np.ptp(r.queries) * np.ptp(r.keys) for r in ranges])
        return found

    block = (size // ranks) ** 2
    assert all(set(each) == {block // 2} for each in work(zigzag(size, ranks)))
    contiguous = work(np.array_split(np.arange(size), ranks))
    assert all({0, block} == set(each) for each in contiguous)
