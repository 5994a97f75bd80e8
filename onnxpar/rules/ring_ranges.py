"""Which queries and keys of a block a rank of a ring must compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.rules.attention_lowering import WINDOW

Array = np.ndarray[Any, Any]
Bounds = tuple[int, int]
"""Start and end (exclusive) of a range."""


@dataclass(frozen=True)
class Range:
    """A range of queries and a range of keys, outside of which no query sees a key. `is_full` is
    True if each query of the range sees all keys of the range, so that no mask is needed."""

    queries: Bounds
    keys: Bounds
    is_full: bool


def zigzag(size: int, ranks: int) -> list[Array]:
    """Returns the positions of each rank if rank i has parts i and 2n-1-i of 2n: an early and a
    late part, so that each rank has queries that see few keys and queries that see many. Eight
    positions on two ranks: [0, 1, 6, 7] and [2, 3, 4, 5]."""
    parts = np.array_split(np.arange(size), 2 * ranks)
    return [np.concatenate([parts[i], parts[-1 - i]]) for i in range(ranks)]


def seen_range(
    attrs: Mapping[str, Any], queries: Array, keys: Array, is_first: bool = False
) -> Range:
    """Returns the ranges of queries and keys between which a rank must compute scores, for an
    Attention with these attributes. `queries` and `keys` are the ascending positions of a block. A
    rank computes its first block (`is_first`) completely, because the first block starts the state
    of every query."""
    left, right = (attrs.get(key, -1) for key in WINDOW)
    first = queries - left if left >= 0 else np.full(len(queries), -1)
    last = queries + right if right >= 0 else np.full(len(queries), 1 << 62)
    if attrs.get("is_causal"):
        last = np.minimum(last, queries)
    starts = np.searchsorted(keys, first, "left")
    ends = np.searchsorted(keys, last, "right")
    if is_first:
        is_full = bool((starts == 0).all() and (ends == len(keys)).all())
        return Range((0, len(queries)), (0, len(keys)), is_full)
    (seeing,) = np.nonzero(ends > starts)
    if not len(seeing):
        return Range((0, 0), (0, 0), True)
    rows = (int(seeing[0]), int(seeing[-1]) + 1)
    columns = (int(starts[seeing].min()), int(ends[seeing].max()))
    inside = slice(*rows)
    is_full = bool((starts[inside] <= columns[0]).all() and (ends[inside] >= columns[1]).all())
    return Range(rows, columns, is_full)
