"""Counts the rows in a copy of a slice of a tensor, for costs. A row is a run of elements that are
contiguous in memory; each row takes extra time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxpar.layout.dims import Dim, Factor, Product, dim_axes, largest_size, normalize


def rows_within(dim: Dim) -> int:
    """Returns how many rows a copy of the largest shard of one dimension takes. For a single
    factor, 1; for a product, the number of elements of the factors before the last split one; for
    segments, the number of elements, because a Gather copies them singly."""
    dim = normalize(dim)
    if isinstance(dim, Factor):
        return 1
    if isinstance(dim, Product):
        split = [i for i, child in enumerate(dim.children) if dim_axes(child)]
        return math.prod(map(largest_size, dim.children[: split[-1] if split else 0]))
    return largest_size(dim)


def rows_moved(before: Sequence[Dim], after: Sequence[Dim]) -> int:
    """Returns how many rows the rank with the largest shards copies in one step of a reshard that
    turns dimensions `before` into dimensions `after`."""
    rows, outer = 0, 1
    for b, a in zip(before, after, strict=True):
        if b != a:
            rows += outer * max(rows_within(b), rows_within(a))
        outer *= max(largest_size(b), largest_size(a))
    return rows
