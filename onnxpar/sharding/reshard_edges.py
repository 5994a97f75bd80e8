"""The single steps (one collective or local cut) between states of a reshard graph, as arrays. A
state is a factor sharding: it has a location for each sub-axis of the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.layout.mesh import Axes, Axis
from onnxpar.sharding.factors import TensorFactors
from onnxpar.sharding.numbering import Numbering
from onnxpar.sharding.reshard_steps import StepKinds
from onnxpar.sharding.sub_axes import Location, Locations, leaves_at

_WORD = 62
"""Bits of a word in a bit set of leaves."""


@dataclass(frozen=True)
class Edges:
    """All steps of a reshard graph that move the same sub-axes (factors of mesh axes), `axes`.

    kinds    the distinct kinds of the steps, such as "AllGather"
    kind     for each step, the index of its kind in `kinds`
    start    for each step, the index of the state before the step
    end      for each step, the index of the state after the step
    changed  [step, dimension]: True if the step cuts or joins shards of the tensor's dimension
    """

    axes: Axes
    kinds: Sequence[str]
    kind: Array
    start: Array
    end: Array
    changed: Array


@dataclass(frozen=True)
class Moves:
    """Finds the steps that move one or more sub-axes from a common location to another common
    location. An all-gather, for example, moves sub-axes from a leaf (a part of a dimension) to
    unused.

    locations  the possible locations of each sub-axis (a factor of a mesh axis): leaves, a partial
               reduction (each rank holds one term), or unused
    states     the states: the index of a location for each sub-axis
    valid      for each state, True if steps may start or end there
    factors    the factors of the tensor
    """

    sub_axes: Sequence[Axis]
    locations: Locations
    states: Numbering
    valid: Array
    factors: TensorFactors

    def edges(self) -> Iterator[Edges]:
        """Yields the steps, one `Edges` for each set of moved sub-axes (factors of mesh axes)."""
        kinds = StepKinds(self.factors)
        for n in range(1, len(self.sub_axes) + 1):
            for run in combinations(range(len(self.sub_axes)), n):
                yield self._of_run(run, kinds)

    def _of_run(self, run: Sequence[int], kinds: StepKinds) -> Edges:
        """Returns the steps that move the sub-axes with indices `run`. Sub-axes on a leaf (a part
        of a dimension) are ordered, so a step is possible only if no other sub-axis comes after the
        moved ones on a leaf that it changes."""
        common = [w for w in self.locations[run[0]] if all(w in self.locations[i] for i in run)]
        axes = tuple(self.sub_axes[i] for i in run)
        names, table = kinds.table(axes, common)
        shift = np.zeros((len(common), len(common)), int)
        at = self._places(run[0], common)
        mask = self.valid & (at >= 0)
        for i in run:
            number = np.array([self.locations[i].index(w) for w in common]) * self.states.strides[i]
            shift += number[None, :] - number[:, None]
            mask &= self._places(i, common) == at
        touched = self._touched(common)
        start = np.flatnonzero(mask)
        source = at[start]
        rows, targets = np.nonzero(table[source] >= 0)
        end = self._valid[self.states.numbers[start][rows] + shift[source[rows], targets]]
        ok = end >= 0
        across = touched[source[rows], targets]
        for i in self._later(run):
            ok &= ~(across & self._bits[i][self.states.places[start, i]][rows]).any(-1)
        rows, targets, end = rows[ok], targets[ok], end[ok]
        source = source[rows]
        changed = self._changed(touched)[source, targets]
        return Edges(axes, names, table[source, targets], start[rows], end, changed)

    def _later(self, run: Sequence[int]) -> list[int]:
        """Returns the indices of the sub-axes behind the first sub-axis (a factor of a mesh axis)
        of `run`, without those of `run`."""
        return [i for i in range(min(run) + 1, len(self.sub_axes)) if i not in run]

    def _places(self, sub_axis: int, common: Sequence[Location]) -> Array:
        """For each state, the index in `common` of the location where the sub-axis (a factor of a
        mesh axis) is; -1 if that location is not in `common`."""
        indices = [common.index(w) if w in common else -1 for w in self.locations[sub_axis]]
        return np.array(indices)[self.states.places[:, sub_axis]]

    def _touched(self, common: Sequence[Location]) -> Array:
        """Returns [location before, location after, word]: bit sets of the leaves (parts of
        dimensions) that a step between two locations of `common` changes."""
        bits = np.stack([self._bits_of(location) for location in common])
        touched: Array = bits[:, None] ^ bits[None, :]
        return touched

    def _changed(self, touched: Array) -> Array:
        """Returns [..., dimension]: True if a bit set of `touched` [..., word] has a leaf (a part
        of a dimension) of the dimension."""
        return np.asarray((touched[..., None, :] & self._dims).any(-1))

    @cached_property
    def _valid(self) -> Array:
        """For each number of a state, the state's index; -1 if the state is not valid."""
        index = self.states.index
        return np.where((index >= 0) & self.valid[index], index, -1)

    @cached_property
    def _dims(self) -> Array:
        """Returns [dimension, word]: the bit set of each dimension's leaves (parts of
        dimensions)."""
        of, count = self.factors.dim_of_leaf, len(self.factors.dims)
        by_dim = [tuple(i for i, at in enumerate(of) if at == dim) for dim in range(count)]
        return np.stack([np.zeros_like(self._bits_of(None)), *map(self._bits_of, by_dim)])[1:]

    @cached_property
    def _bits(self) -> list[Array]:
        """For each sub-axis (a factor of a mesh axis) and each of its locations, the bit set of the
        location's leaves (parts of dimensions)."""
        return [np.stack([self._bits_of(w) for w in places]) for places in self.locations]

    def _bits_of(self, location: Location) -> Array:
        """Returns the bit set of the leaves (parts of dimensions) of a location, as an array of
        words."""
        leaves = leaves_at(location)
        if leaves not in self._bits_cache:
            self._bits_cache[leaves] = self._words(leaves)
        return self._bits_cache[leaves]

    @cached_property
    def _bits_cache(self) -> dict[frozenset[int], Array]:
        return {}

    def _words(self, leaves: frozenset[int]) -> Array:
        words = [0] * (len(self.factors.leaves) // _WORD + 1)
        for leaf in leaves:
            words[leaf // _WORD] |= 1 << leaf % _WORD
        return np.array(words, np.int64)
