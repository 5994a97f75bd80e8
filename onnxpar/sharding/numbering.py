"""Numbers the states of a set of items. A state has a place for each item; in a reshard graph,
items are the sub-axes of the mesh, and places are leaves, a partial reduction, or unused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from onnxpar.base.arrays import Array


class Numbering:
    """Numbers all states of `len(counts)` items, of which item `i` has `counts[i]` possible places,
    and lists the kept states.

    A state's number is the sum of `strides` times places; it is less than `most`. `numbers` has the
    numbers of kept states, in rising order. A state's index is its position in `numbers`.
    """

    def __init__(self, counts: Sequence[int], kept: Array | None = None) -> None:
        """`kept[number]` is true for the states to keep; None keeps all states."""
        self.counts = counts
        self.strides = [math.prod(counts[i + 1 :]) for i in range(len(counts))]
        self.most = math.prod(counts)
        self.numbers: Array = np.arange(self.most) if kept is None else np.flatnonzero(kept)

    @cached_property
    def places(self) -> Array:
        """[kept state, item]: the item's place in the state."""
        return self.places_of(self.numbers)

    def places_of(self, numbers: Array) -> Array:
        """Returns [number, item]: the item's place in the state with this number."""
        pairs = zip(self.strides, self.counts, strict=True)
        columns = [numbers // stride % count for stride, count in pairs]
        return np.array(columns, int).reshape(len(self.counts), len(numbers)).T

    @cached_property
    def index(self) -> Array:
        """[number]: the index of the state with this number; -1 if the state is not kept."""
        index_of: Array = np.full(self.most, -1)
        index_of[self.numbers] = np.arange(len(self.numbers))
        return index_of


def distinct(columns: Iterable[Array], counts: Sequence[int]) -> tuple[Array, Array]:
    """Finds the distinct rows of a table. Returns (for each distinct row, the index of one such row
    in the table; for each row of the table, its position among the distinct rows).

    columns  the columns of the table, of integers
    counts   for each column, a number above all its values; no value is negative
    """
    codes: Array = np.zeros(1, int)
    for column, count in zip(columns, counts, strict=True):
        codes = codes * count + column
    if math.prod(counts) > 4 * len(codes):
        _, example_rows, which = np.unique(codes, return_index=True, return_inverse=True)
        return example_rows, which.reshape(-1)
    example: Array = np.full(math.prod(counts), -1)
    example[codes] = np.arange(len(codes))
    is_there = example >= 0
    return example[is_there], (np.cumsum(is_there) - 1)[codes]
