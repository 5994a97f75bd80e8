"""Sequences of numbers that mostly count up: those of the elements of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.equivalence.lemma import NotShown
from onnxpar.equivalence.program import Shape
from onnxpar.equivalence.spans import places_of

MOST_RUNS = 1 << 22
"""The most runs of a tensor."""


class Runs:
    """The numbers of the elements of a tensor with a shape, in row-major order: `counts[i]` numbers
    from `starts[i]` on. Equal sequences have equal runs."""

    def __init__(self, shape: Shape, starts: Array, counts: Array) -> None:
        if len(starts) > MOST_RUNS:
            raise NotShown(f"more than {MOST_RUNS} runs are too many to follow")
        kept = counts > 0
        starts, counts = starts[kept], counts[kept]
        is_first = np.ones(len(starts), bool)
        is_first[1:] = starts[1:] != starts[:-1] + counts[:-1]
        firsts = np.flatnonzero(is_first)
        self.shape = shape
        self.starts = starts[firsts]
        self.counts = np.add.reduceat(counts, firsts) if len(firsts) else counts
        self._ends = np.cumsum(self.counts)
        if (int(self._ends[-1]) if len(firsts) else 0) != math.prod(shape):
            raise ValueError(f"{shape} is not the shape of these numbers")

    @classmethod
    def of(cls, numbers: Array) -> Runs:
        """The runs of numbers that are given one by one."""
        flat = numbers.reshape(-1)
        return cls(numbers.shape, flat, np.ones(len(flat), np.int64))

    @classmethod
    def at(cls, spans: Sequence[Array], shape: Shape, first: int) -> Runs:
        """The numbers of the elements at these positions of each dimension of a tensor, whose own
        elements are numbered from `first` on."""
        local = tuple(map(len, spans))
        axis, inner = len(shape), 1
        while axis and np.array_equal(spans[axis - 1], np.arange(shape[axis - 1])):
            axis -= 1
            inner *= shape[axis]
        if not axis or 0 in local:
            return cls(local, np.array([first]), np.array([math.prod(local)]))
        span = spans[axis - 1]
        breaks = np.flatnonzero(np.diff(span) != 1) + 1
        lengths = np.diff(np.concatenate([[0], breaks, [len(span)]]))
        begins = span[np.concatenate([[0], breaks])]
        if math.prod(local[: axis - 1]) * len(begins) > MOST_RUNS:
            raise NotShown(f"more than {MOST_RUNS} runs are too many to follow")
        lead = places_of(spans[: axis - 1], shape[: axis - 1]).reshape(-1)
        starts = (lead[:, None] * shape[axis - 1] + begins) * inner + first
        counts = np.broadcast_to(lengths * inner, starts.shape)
        return cls(local, starts.reshape(-1), counts.reshape(-1))

    @property
    def numbers(self) -> Array:
        """The numbers one by one. NotShown if there are too many."""
        if math.prod(self.shape) > MOST_RUNS:
            raise NotShown(f"more than {MOST_RUNS} elements are too many to follow")
        shifts = self.starts - (self._ends - self.counts)
        flat = np.repeat(shifts, self.counts) + np.arange(math.prod(self.shape))
        return np.asarray(flat).reshape(self.shape)

    def same(self, other: Runs) -> bool:
        """True for the same numbers in the same shape."""
        return self.shape == other.shape and (
            np.array_equal(self.starts, other.starts) and np.array_equal(self.counts, other.counts)
        )

    def line(self, axis: int) -> Array:
        """The numbers of the elements that are the first of each other dimension."""
        flat = np.arange(self.shape[axis]) * math.prod(self.shape[axis + 1 :])
        run = np.searchsorted(self._ends, flat, "right")
        return np.asarray(self.starts[run] + flat - (self._ends - self.counts)[run])

    def spans(self, shape: Shape, first: int) -> list[Array] | None:
        """The inverse of `at`: the positions of each dimension of a tensor with this shape; None if
        the numbers are not those of some positions. Beside an empty dimension, positions hold
        nothing, and are the first ones."""
        if len(self.shape) != len(shape):
            return None
        if 0 in self.shape:
            return [np.arange(n) % max(size, 1) for n, size in zip(self.shape, shape, strict=True)]
        spans = [
            (self.line(axis) - first) // math.prod(shape[axis + 1 :]) % size
            for axis, size in enumerate(shape)
        ]
        return spans if self.same(Runs.at(spans, shape, first)) else None

    def reshape(self, shape: Shape) -> Runs:
        """The same numbers in another shape."""
        return Runs(tuple(map(int, shape)), self.starts, self.counts)

    def cut(self, axis: int, start: int, stop: int) -> Runs:
        """The positions from `start` to `stop` of a dimension."""
        axis = _dimension(axis, self.shape)
        if not 0 <= start <= stop <= self.shape[axis]:
            raise ValueError(f"positions {start} to {stop} of {self.shape[axis]}")
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        inner = math.prod(self.shape[axis + 1 :])
        rows = np.arange(math.prod(self.shape[:axis])) * self.shape[axis] * inner
        return self._take(shape, rows + start * inner, rows + stop * inner)

    @staticmethod
    def join(parts: Sequence[Runs], axis: int) -> Runs:
        """Parts one behind the other along a dimension; all others are equal."""
        first = parts[0].shape
        axis = _dimension(axis, first)
        if any((*p.shape[:axis], *p.shape[axis + 1 :]) != (*first[:axis], *first[axis + 1 :])
               for p in parts):  # fmt: skip
            raise ValueError("parts have other dimensions")
        shape = (*first[:axis], sum(p.shape[axis] for p in parts), *first[axis + 1 :])
        starts, counts = (
            np.concatenate([getattr(p, n) for p in parts]) for n in ("starts", "counts")
        )
        rows = math.prod(first[:axis])
        if rows <= 1:
            return Runs(shape, starts, counts)
        lengths = np.array([math.prod(p.shape[axis:]) for p in parts])
        begins = np.concatenate([[0], np.cumsum(lengths * rows)[:-1]])
        begin = (begins + np.arange(rows)[:, None] * lengths).reshape(-1)
        end = begin + np.tile(lengths, rows)
        return Runs((int(counts.sum()),), starts, counts)._take(shape, begin, end)

    def _take(self, shape: Shape, begins: Array, ends: Array) -> Runs:
        """The elements in ranges of the row-major order, one range behind the other."""
        points = np.sort(np.concatenate([[0], self._ends, begins, ends]), kind="stable")
        points = points[np.diff(points, prepend=-1) != 0]  # quicker than np.unique
        run = np.minimum(np.searchsorted(self._ends, points[:-1], "right"), len(self._ends) - 1)
        starts = self.starts[run] + points[:-1] - (self._ends - self.counts)[run]
        low, high = np.searchsorted(points, begins), np.searchsorted(points, ends)
        sizes = high - low
        if sizes.sum() > MOST_RUNS:
            raise NotShown(f"more than {MOST_RUNS} runs are too many to follow")
        before = np.cumsum(sizes) - sizes
        chosen = np.repeat(low - before, sizes) + np.arange(sizes.sum())
        return Runs(shape, starts[chosen], np.diff(points)[chosen])


def _dimension(axis: int, shape: Shape) -> int:
    """The number of a dimension. Errors: ValueError if the shape has none with that number."""
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{list(shape)} has no dimension {axis}")
    return axis % len(shape)
