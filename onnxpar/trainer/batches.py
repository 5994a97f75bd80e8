"""Makes batches of samples; for a step for several lengths, of samples of similar length."""

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
    """Makes batches for a step that reads `needs`.

    lengths  the shapes of the inputs in the programs of the step, the shortest first; the last are
             also in `needs`

    The length of a sample ends with its last value other than the fill value. So an epoch has as
    many batches as without lengths: all are full but the last.
    """

    needs: Needs
    lengths: Sequence[Shapes]

    @staticmethod
    def of(needs: Needs, lengths: Sequence[Shapes]) -> Batches:
        """Returns batches of these lengths. Errors: InputError if an input that is shorter in some
        of them has no fill value."""
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
        """The inputs and dimensions that programs have in different sizes."""
        last = self.lengths[-1] if self.lengths else {}
        return [
            (name, axis)
            for name, shape in last.items()
            for axis, size in enumerate(shape)
            if any(each[name][axis] != size for each in self.lengths)
        ]

    def made(self, chunks: Iterable[Chunk], first: int = 0) -> Iterator[Chunk]:
        """Yields the samples of chunks (each of at most a batch) in batches, without the first
        `first` batches. The last batch may have fewer samples. Samples that fill no batch of their
        length join a batch of longer samples."""
        for number, batch in enumerate(self._every(chunks)):
            if number >= first:
                yield batch

    def _every(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
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
        """Returns a full batch of some samples, if there are enough, and the rest, if there is
        one. Both parts have at most a batch."""
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
        """Yields the samples of a chunk in groups, each with the number of the shortest program
        that holds them."""
        if len(self.lengths) < 2:
            yield 0, chunk
            return
        each = self._numbers(chunk)
        for number in sorted({*each.tolist()}):
            yield number, self.needs.take(chunk, np.flatnonzero(each == number))

    def _numbers(self, chunk: Chunk) -> Array:
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
        """Returns a batch as long as the shortest program that holds all of its samples."""
        shapes = self.lengths[self._numbers(batch).max()] if self.lengths else {}
        shorter = {
            name: batch[name][tuple(slice(size) for size in shape)]
            for name, shape in shapes.items()
        }
        return {name: np.ascontiguousarray(array) for name, array in {**batch, **shorter}.items()}


def _elements(shapes: Shapes) -> int:
    return sum(int(np.prod(shape)) for shape in shapes.values())
