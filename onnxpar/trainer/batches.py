"""Joins samples to batches. For a step with programs for several lengths, a batch has samples of
similar length, and is as short as its longest sample allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.trainer.needs import Chunk, Needs

Shapes = Mapping[str, Sequence[int]]
"""The shapes of the inputs of a step, by name."""


@dataclass(frozen=True)
class Batches:
    """Joins samples to batches for a step that reads `needs`.

    lengths  the shapes of the inputs in the programs of the step, the shortest first; the last are
             also in `needs`. Empty for a step with one program

    The length of a sample ends with its last value other than the fill value. An epoch has as many
    batches as without lengths: all are full but the last.
    """

    needs: Needs
    lengths: Sequence[Shapes]

    @staticmethod
    def of(needs: Needs, lengths: Sequence[Shapes]) -> Batches:
        """Returns a maker of batches for these lengths. Errors: InputError if an input that is
        shorter in some programs has no fill value, by which lengths are measured."""
        batches = Batches(needs, sorted(lengths, key=_elements))
        for name, _ in batches._open:
            if name in needs.dims and name not in needs.pad:
                raise InputError(
                    f"the step has programs for shorter samples: say what fills those of {name!r} "
                    f"with --pad {name}=VALUE, by which their lengths are found"
                )
        return batches

    @property
    def _open(self) -> list[tuple[str, int]]:
        """The (input, dimension) pairs whose size differs between programs."""
        last = self.lengths[-1] if self.lengths else {}
        return [
            (name, axis)
            for name, shape in last.items()
            for axis, size in enumerate(shape)
            if any(each[name][axis] != size for each in self.lengths)
        ]

    def made(self, chunks: Iterable[Chunk], first: int = 0) -> Iterator[Chunk]:
        """Yields batches of the samples in `chunks` (each of at most a batch), without the first
        `first` batches. The last batch may have fewer samples. Samples that fill no batch of their
        length join a batch of longer samples."""
        for number, batch in enumerate(self._every(chunks)):
            if number >= first:
                yield batch

    def _every(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Like `made`, from the first batch on."""
        rests: list[Chunk | None] = [None] * max(len(self.lengths), 1)
        for chunk in chunks:
            for at, part in self._by_length(chunk):
                full, rests[at] = self._full([rests[at], part])
                if full is not None:
                    yield self._cut(full)
        for at in range(len(rests) - 1):
            full, rests[at + 1] = self._full([rests[at], rests[at + 1]])
            if full is not None:
                yield self._cut(full)
        if rests[-1] is not None:
            yield self._cut(rests[-1])

    def _full(self, parts: Sequence[Chunk | None]) -> tuple[Chunk | None, Chunk | None]:
        """Joins two parts of at most a batch each (None: no samples). Returns (a full batch, or
        None if there are too few samples; the rest, or None)."""
        needs, size = self.needs, self.needs.batch
        present = [part for part in parts if part is not None]
        if not present:
            return None, None
        joined = needs.joined(present)
        have = needs.count(joined)
        if have < size:
            return None, joined
        if have == size:
            return joined, None
        return needs.take(joined, np.arange(size)), needs.take(joined, np.arange(size, have))

    def _by_length(self, chunk: Chunk) -> Iterator[tuple[int, Chunk]]:
        """Yields groups of a chunk's samples, each with the number of the shortest program that has
        room for them."""
        if len(self.lengths) < 2:
            yield 0, chunk
            return
        each = self._numbers(chunk)
        for number in sorted({*each.tolist()}):
            yield number, self.needs.take(chunk, np.flatnonzero(each == number))

    def _numbers(self, chunk: Chunk) -> Array:
        """Returns for each sample of a chunk the number of the shortest program that has room for
        it."""
        fit = np.ones((len(self.lengths), self.needs.count(chunk)), bool)
        for name, axis in self._open:
            if name in self.needs.dims:
                used = self._used(name, axis, chunk[name])
                for number, shapes in enumerate(self.lengths):
                    fit[number] &= used <= shapes[name][axis]
        return np.asarray(fit.argmax(0))

    def _used(self, name: str, axis: int, array: Array) -> Array:
        """Returns the length of each sample of an input along dimension `axis`: up to the last
        value other than the fill value."""
        at, fill = self.needs.dims[name], np.asarray(self.needs.pad[name]).astype(array.dtype)
        others = tuple(k for k in range(array.ndim) if k not in (at, axis))
        is_own = (array != fill).any(axis=others)  # samples and places, in the order of dimensions
        is_own = is_own if at < axis else is_own.T
        ends = is_own.shape[1] - is_own[:, ::-1].argmax(1)
        return np.where(is_own.any(1), ends, 0)

    def _cut(self, batch: Chunk) -> Chunk:
        """Returns a batch cut to the shapes of the shortest program that has room for all of its
        samples."""
        shapes = self.lengths[self._numbers(batch).max()] if self.lengths else {}
        shorter = {
            name: batch[name][tuple(slice(size) for size in shape)]
            for name, shape in shapes.items()
        }
        return {name: np.ascontiguousarray(array) for name, array in {**batch, **shorter}.items()}


def _elements(shapes: Shapes) -> int:
    """Returns the number of elements of all inputs together."""
    return sum(int(np.prod(shape)) for shape in shapes.values())
