"""Numbers states. A state has a place for each item; in a reshard graph, items are sub-axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from onnxpar.base.arrays import Array


class Numbering:
    """All states, or the kept states; item `i` has `counts[i]` possible places.

    A state's number is the sum of `strides` times places, below `most`. `numbers` are the numbers
    of kept states, in rising order; a state's index is its position in `numbers`.
    """

    def __init__(self, counts: Sequence[int], kept: Array | None = None) -> None:
        """`kept`, by number, is true for states to keep; None keeps all states."""
        self.counts = counts
        self.strides = [math.prod(counts[i + 1 :]) for i in range(len(counts))]
        self.most = math.prod(counts)
        self.numbers: Array = np.arange(self.most) if kept is None else np.flatnonzero(kept)

    @cached_property
    def places(self) -> Array:
        """[kept state, item]: the place of the item in the state."""
        return self.places_of(self.numbers)

    def places_of(self, numbers: Array) -> Array:
        """[number, item]: the place of the item in the state with this number."""
        pairs = zip(self.strides, self.counts, strict=True)
        columns = [numbers // stride % count for stride, count in pairs]
        return np.array(columns, int).reshape(len(self.counts), len(numbers)).T

    @cached_property
    def index(self) -> Array:
        """The index of each state, by number; -1 if the state is not kept."""
        index_of: Array = np.full(self.most, -1)
        index_of[self.numbers] = np.arange(len(self.numbers))
        return index_of


def distinct(columns: Iterable[Array], counts: Sequence[int]) -> tuple[Array, Array]:
    """Finds the distinct rows of integer columns; values of a column are 0 to count - 1. Returns an
    example's index for each distinct row, and each row's position among the distinct rows."""
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
