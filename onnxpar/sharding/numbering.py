"""Numbers of states in which each of several things has one of a few places."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from onnxpar.base.arrays import Array


class Numbering:
    """All states in which thing `i` has one of `counts[i]` places, or those of them that are kept.

    A state's number is the sum of `strides` times places, below `most`; `numbers` has those of the
    states that are kept, in rising order. The position in it is a state's index.
    """

    def __init__(self, counts: Sequence[int], kept: Array | None = None) -> None:
        """`kept` is true for the numbers of states that are kept; by default, all are."""
        self.counts = counts
        self.strides = [math.prod(counts[i + 1 :]) for i in range(len(counts))]
        self.most = math.prod(counts)
        self.numbers: Array = np.arange(self.most) if kept is None else np.flatnonzero(kept)

    @cached_property
    def places(self) -> Array:
        """For each state that is kept (rows), the place of each thing (columns)."""
        return self.places_of(self.numbers)

    def places_of(self, numbers: Array) -> Array:
        """The place of each thing (columns) in states with these numbers (rows)."""
        each = zip(self.strides, self.counts, strict=True)
        columns = [numbers // stride % count for stride, count in each]
        return np.array(columns, int).reshape(len(self.counts), len(numbers)).T

    @cached_property
    def index(self) -> Array:
        """The index of each state by its number, or -1 if it is not kept."""
        found: Array = np.full(self.most, -1)
        found[self.numbers] = np.arange(len(self.numbers))
        return found


def distinct(columns: Iterable[Array], counts: Sequence[int]) -> tuple[Array, Array]:
    """The distinct rows of columns of integers, each from 0 to below its count: the index of a row
    that has each, and for each row the position of its own among them."""
    codes: Array = np.zeros(1, int)
    for column, count in zip(columns, counts, strict=True):
        codes = codes * count + column
    if math.prod(counts) > 4 * len(codes):
        _, found, which = np.unique(codes, return_index=True, return_inverse=True)
        return found, which.reshape(-1)
    example: Array = np.full(math.prod(counts), -1)
    example[codes] = np.arange(len(codes))
    is_there = example >= 0
    return example[is_there], (np.cumsum(is_there) - 1)[codes]
