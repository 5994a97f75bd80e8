"""Cuts shards out of global arrays, and assembles global arrays from shards; where each shard lies
is computed once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import RankError
from onnxpar.layout.layout import Dim, Factor, Layout, dim_axes, indices, is_data_dependent, runs
from onnxpar.layout.mesh import Mesh
from onnxpar.runtime.session.bundle import Bundle, Sizes

Index = tuple[Any, ...]
"""A NumPy index."""
Rows = tuple[int, int] | None
"""(first row, last row + 1) of a shard; None for all rows."""
MANY_BLOCKS = 64
"""If a shard has more contiguous blocks than this, one copy by indices is faster than a copy of
each slice."""


class Shards:
    """How one tensor is split over the ranks, and the copies between the global array and the
    shards.

    layout  None if the number of dimensions is data-dependent: every rank then has the whole
            tensor. A dimension of data-dependent size has size -1 there, and is not split.
    """

    def __init__(self, layout: Layout | None, mesh: Mesh) -> None:
        self._layout = None if layout is None or layout.is_whole else layout
        self._all = layout
        dims = layout.dims if layout is not None else ()
        self._by_data = [i for i, dim in enumerate(dims) if is_data_dependent(dim)]
        self._mesh = mesh
        self._blocks = lru_cache(maxsize=None)(self._find_blocks)
        self._of = lru_cache(maxsize=8)(self._with_sizes)

    @property
    def is_whole(self) -> bool:
        """True if every rank has the whole tensor."""
        return self._layout is None

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The ranks whose shards make up the tensor: of ranks with the same shard, the first."""
        return tuple(sorted(set(self.origins)))

    @cached_property
    def origins(self) -> tuple[int, ...]:
        """For each rank, the first rank that has the same shard."""
        if self._layout is None:
            return (0,) * self._mesh.size
        axes = tuple(a for d in self._layout.dims for a in dim_axes(d)) + self._layout.partial
        first: dict[tuple[int, ...], int] = {}
        return tuple(
            first.setdefault(tuple(self._mesh.coordinate((a,), rank) for a in axes), rank)
            for rank in range(self._mesh.size)
        )

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """Returns the shape of a rank's shard; None if any size of the tensor is data-dependent."""
        if self._all is None or self._by_data:
            return None
        return self._all.local_shape(self._mesh, rank)

    def check_shape(
        self, name: str, rank: int, shape: tuple[int, ...], binding: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Returns the global shape of tensor `name`, whose shard on `rank` has the shape `shape`.
        `binding` has the open sizes of the run, for the error. Errors: RankError if the shape
        contradicts the layout."""
        if self._all is None:
            return shape
        expected = self._all.local_shape(self._mesh, rank)
        # of a loop without trips, onnxruntime gives the rows no size that it does not infer
        is_empty = any(shape[i] == 0 for i in self._by_data if i < len(shape))
        if len(shape) == len(expected) and (
            is_empty or all(e in (s, -1) for s, e in zip(shape, expected, strict=True))
        ):
            return tuple(
                s if i in self._by_data else whole
                for i, (s, whole) in enumerate(zip(shape, self._all.shape, strict=True))
            )
        says = ", ".join("?" if e < 0 else str(e) for e in expected)
        sizes = ", ".join(f"{symbol}={size}" for symbol, size in binding.items())
        raise RankError(
            f"{name!r} has the shape {list(shape)} on rank {rank}; its layout says [{says}]"
            + (f" for {sizes}" if sizes else "")
            + ". Feeds that contradict each other can cause this; if yours do not, a shape or a "
            "rule is wrong: please report the model"
        )

    def of_shape(self, shape: Mapping[int, int]) -> Shards:
        """Returns the shards at given data-dependent sizes, {dimension: size}."""
        return self._of(tuple(sorted(shape.items())))

    def _with_sizes(self, sizes: tuple[tuple[int, int], ...]) -> Shards:
        """`of_shape` for sizes as a tuple, which can be cached."""
        assert self._all is not None
        dims = list(self._all.dims)
        for i, size in sizes:
            dims[i] = Factor(size)
        return Shards(Layout(tuple(dims), self._all.partial, self._all.reduce), self._mesh)

    def _for_array(self, array: Array) -> Shards:
        """Returns the shards at the data-dependent sizes that `array` has: the global array or a
        shard, which are equal in these dimensions."""
        return self.of_shape({i: array.shape[i] for i in self._by_data})

    def take(self, whole: Array, rank: int) -> Array:
        """Returns a rank's shard of a global array: contiguous, and a view if possible. A value
        that is not an array is returned as it is."""
        if not isinstance(whole, np.ndarray):
            return whole
        if self._layout is None:
            part = whole
        elif self._by_data:
            return self._for_array(whole).take(whole, rank)
        elif self._layout.partial:
            part = self._layout.take(whole, self._mesh, rank)
        else:
            blocks = self._blocks(rank)
            if len(blocks) > 1:
                part = np.empty(self._layout.local_shape(self._mesh, rank), whole.dtype)
                self.write(whole, rank, part)
            else:
                part = np.asarray(whole[blocks[0][0]])
        return part if part.flags.c_contiguous else part.copy()

    def write(self, whole: Array, rank: int, part: Array) -> None:
        """Copies a rank's shard of the global array `whole` into the array `part`."""
        if self._layout is None:
            np.copyto(part, whole)
        elif self._by_data:
            self._for_array(whole).write(whole, rank, part)
        elif self._layout.partial:
            np.copyto(part, self._layout.take(whole, self._mesh, rank))
        else:
            for there, here in self._blocks(rank):
                part[here] = whole[there]

    def assemble(self, parts: Mapping[int, Array]) -> Array:
        """Returns a new global array, assembled from the shards of the ranks in `sources`."""
        if self._layout is None:
            return np.array(parts[0]) if isinstance(parts[0], np.ndarray) else parts[0]
        if self._by_data:
            return self._for_parts(parts).assemble(parts)
        if self._layout.partial:
            return self._layout.assemble(self._for_all_ranks(parts), self._mesh)
        whole: Array = np.empty(self._layout.shape, parts[self.sources[0]].dtype)
        for rank in self.sources:
            for there, here in self._blocks(rank):
                whole[there] = parts[rank][here]
        return whole

    def rows(self, rank: int) -> int | None:
        """Returns the number of rows of a rank's shard, for copies of some rows by `place`; None if
        the tensor can only be assembled from whole shards: a scalar, a partial sum, or of
        data-dependent shape."""
        shape = self.local_shape(rank)
        is_partial = self._layout is not None and bool(self._layout.partial)
        return shape[0] if shape and not is_partial else None

    def place(self, whole: Array, rank: int, start: int, part: Array) -> None:
        """Copies `part`, the rows of a rank's shard from row `start` on, to their places in the
        global array `whole`."""
        end = start + len(part)
        if self._layout is None:
            whole[start:end] = part
            return
        for there, here in self._blocks(rank):
            if here[0] is Ellipsis:
                whole[(there[0][start:end], *there[1:])] = part
                continue
            first, last = max(here[0].start, start), min(here[0].stop, end)
            if first < last:
                shift = there[0].start - here[0].start
                of_part = (slice(first - start, last - start), *here[1:])
                whole[(slice(first + shift, last + shift), *there[1:])] = part[of_part]

    def _for_parts(self, parts: Mapping[int, Array]) -> Shards:
        """Returns the shards at the data-dependent sizes of these arrays, by rank. Errors:
        RankError if the sizes differ between ranks."""
        first, *others = self.sources
        for i in self._by_data:
            for rank in others:
                if parts[rank].shape[i] != parts[first].shape[i]:
                    raise RankError(
                        f"dimension {i} of a result has {parts[first].shape[i]} elements on rank "
                        f"{first}, but {parts[rank].shape[i]} on rank {rank}: its size depends on "
                        "data, which must be the same on all ranks"
                    )
        return self._for_array(parts[first])

    def _find_blocks(self, rank: int) -> list[tuple[Index, Index]]:
        """Returns (index into the global array, index into the shard) for each contiguous block of
        a rank's shard; for many blocks, one pair with arrays of indices."""
        assert self._layout is not None
        spans = [_spans(d, self._mesh, rank) for d in self._layout.dims]
        if math.prod(map(len, spans)) > MANY_BLOCKS:
            at = np.ix_(*(indices(d, self._mesh, rank) for d in self._layout.dims))
            return [(at, (Ellipsis,))]
        return [
            (tuple(there for there, _ in block), tuple(here for _, here in block))
            for block in itertools.product(*spans)
        ]

    def _for_all_ranks(self, parts: Mapping[int, Array]) -> list[Array]:
        """Returns a list with an array for each rank, as `Layout.assemble` takes it: `parts`, and
        for ranks that are not in `sources` any array, which is not read."""
        filler = parts[self.sources[0]]
        return [parts.get(rank, filler) for rank in range(self._mesh.size)]


class PortParts:
    """How all inputs and outputs of a sharded model are split, at the open sizes of a run.
    `at(sizes)` returns the `Shards` by name."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._ports = {**bundle.inputs, **bundle.outputs}
        self._fixed = {
            name: Shards(port.layout, bundle.mesh)
            for name, port in self._ports.items()
            if port.open_layout is None
        }
        self.at = lru_cache(maxsize=32)(self._at)

    def _at(self, sizes: Sizes) -> Mapping[str, Shards]:
        """Returns the shards by input or output, for these values of the model's symbols."""
        binding = dict(zip(self._bundle.symbols, sizes, strict=True))
        opened = {}
        for name, port in self._ports.items():
            layout = port.layout_at(binding) if name not in self._fixed else None
            if layout is not None:
                opened[name] = Shards(layout, self._bundle.mesh)
        return {**self._fixed, **opened}


def _spans(dim: Dim, mesh: Mesh, rank: int) -> list[tuple[slice, slice]]:
    """Returns (slice of the global array, slice of the shard) for each contiguous range of a rank's
    shard in one dimension."""
    out, at = [], 0
    for start, length in runs(dim, mesh, rank) or [(0, 0)]:
        out.append((slice(start, start + length), slice(at, at + length)))
        at += length
    return out
