"""Layouts: which elements of a global tensor each rank holds, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.layout.dims import Concat as Concat
from onnxpar.layout.dims import Dim as Dim
from onnxpar.layout.dims import Factor as Factor
from onnxpar.layout.dims import Product as Product
from onnxpar.layout.dims import SizedFactor as SizedFactor
from onnxpar.layout.dims import axis_json, dim_json, dim_of_json, dim_text
from onnxpar.layout.dims import default_parts as default_parts
from onnxpar.layout.dims import dim_axes as dim_axes
from onnxpar.layout.dims import estimated_size as estimated_size
from onnxpar.layout.dims import first_index as first_index
from onnxpar.layout.dims import indices as indices
from onnxpar.layout.dims import is_data_dependent as is_data_dependent
from onnxpar.layout.dims import is_even as is_even
from onnxpar.layout.dims import largest_size as largest_size
from onnxpar.layout.dims import leaves as leaves
from onnxpar.layout.dims import local_size as local_size
from onnxpar.layout.dims import local_sizes as local_sizes
from onnxpar.layout.dims import nested_parts as nested_parts
from onnxpar.layout.dims import normalize as normalize
from onnxpar.layout.dims import runs as runs
from onnxpar.layout.dims import split_count as split_count
from onnxpar.layout.mesh import Axes, Axis, Mesh, in_mesh_order, merge_axes

ReduceOp = Literal["sum", "max", "min", "prod"]


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor over a mesh: for each dimension, the axes that split it (a tree,
    `dims.py`), and the axes over which the tensor is partial. [4, 6] with its last dimension over
    tp=2 is [4, 3] on a rank.

    Ranks along the `partial` axes hold terms of the full shape; combining the terms by `reduce`
    gives the value.
    """

    dims: tuple[Dim, ...]
    partial: Axes = ()
    reduce: ReduceOp = "sum"

    @staticmethod
    def whole(shape: Sequence[int]) -> Layout:
        """The layout in which every rank holds the whole tensor."""
        return Layout(tuple(Factor(int(s)) for s in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(d.size for d in self.dims)

    @property
    def axes(self) -> Axes:
        """All axes that split the tensor or over which it is partial."""
        return tuple(a for d in self.dims for a in dim_axes(d)) + self.partial

    @property
    def is_whole(self) -> bool:
        """True if every rank holds the whole tensor."""
        return not self.axes

    def check_axes(self, mesh: Mesh) -> None:
        """Checks that the mesh has all axes of the layout, with fitting sizes. Errors:
        ValueError."""
        for axis in self.axes:
            size = mesh.sizes.get(axis.name, 0)
            at = 0 if axis.at is None else axis.at
            is_known = axis.size > 0 and axis.pre > 0 and 0 <= at < axis.size
            if not is_known or size % (axis.pre * axis.size) or not size:
                raise ValueError(f"a layout is over {axis}, which is not in the mesh {mesh}")

    def reduced(self) -> Layout:
        """Returns the layout after the terms have been reduced: the same, but not partial."""
        return replace(self, partial=(), reduce="sum") if self.partial else self

    def normalized(self) -> Layout:
        """Returns the layout with the shortest trees that mean the same, for comparison and
        display."""
        return Layout(
            tuple(normalize(d) for d in self.dims),
            merge_axes(in_mesh_order(self.partial)),
            self.reduce if self.partial else "sum",
        )

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard."""
        return tuple(local_size(d, mesh, rank) for d in self.dims)

    def estimated_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """`local_shape` for costs: a data-dependent size counts as 1."""
        return tuple(estimated_size(d, mesh, rank) for d in self.dims)

    def largest_shape(self) -> tuple[int, ...]:
        """The shape of the largest shard; a data-dependent size counts as 1."""
        return tuple(map(largest_size, self.dims))

    def take(self, whole: Array, mesh: Mesh, rank: int) -> Array:
        """Returns a rank's shard of a global array, as a view if possible.

        If the layout is partial, ranks at coordinate 0 of the partial axes get the value, and all
        other ranks the neutral element of the reduction (0 for a sum).
        """
        part = whole
        for i, dim in enumerate(self.dims):
            spans = runs(dim, mesh, rank)
            if len(spans) == 1:
                start, length = spans[0]
                part = part[(slice(None),) * i + (slice(start, start + length),)]
            else:
                part = np.take(part, indices(dim, mesh, rank), axis=i)
        if self.partial and mesh.coordinate(self.partial, rank):
            return np.full_like(part, neutral(self.reduce, part.dtype))
        return part

    def assemble(self, parts: Sequence[Array], mesh: Mesh) -> Array:
        """Returns the global array, given the shards of ranks 0, 1, ...: the inverse of `take`. Of
        several ranks that hold the same elements, the first counts."""
        whole = np.empty(self.shape, parts[0].dtype)
        split = tuple(dict.fromkeys(a for d in self.dims for a in dim_axes(d)))
        written: set[tuple[int, ...]] = set()
        for rank, part in enumerate(parts):
            where = tuple(mesh.coordinate((a,), rank) for a in split)
            if where in written:
                continue
            written.add(where)
            for other in mesh.group(self.partial, rank)[1:] if self.partial else ():
                part = _combine(self.reduce, part, parts[other])
            whole[_open_mesh([indices(d, mesh, rank) for d in self.dims])] = part
        return whole

    def text(self, mesh: Mesh) -> str:
        """The notation of dumps, tables and errors: `[dp, -] sum(tp)` is a matrix with its rows
        split over dp, partial over tp."""
        tidy = self.normalized()
        out = "[" + ", ".join(dim_text(d, mesh) for d in tidy.dims) + "]"
        if self.partial:
            out += f" {tidy.reduce}({'.'.join(mesh.text(a) for a in tidy.partial)})"
        return out

    def to_json(self, normalized: bool = True) -> dict[str, Any]:
        """The layout as lists and dicts for JSON, which `from_json` reads. With `normalized`, its
        trees are as short as possible."""
        tidy = self.normalized() if normalized else self
        return {
            "dims": [dim_json(d) for d in tidy.dims],
            "partial": [axis_json(a) for a in self.partial],
            "reduce": self.reduce,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        """The inverse of `to_json`. Errors: KeyError, TypeError or ValueError for anything else."""
        dims = tuple(dim_of_json(d) for d in data["dims"])
        if data["reduce"] not in get_args(ReduceOp):
            raise ValueError(f"no reduction is named {data['reduce']!r:.60}")
        return Layout(dims, tuple(Axis(*a) for a in data["partial"]), data["reduce"])


def neutral(reduce: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """Returns the neutral element of a reduction: 0 for "sum", 1 for "prod", the least value of the
    dtype for "max", the greatest for "min"."""
    if reduce in ("sum", "prod"):
        return dtype.type(reduce == "prod")
    if dtype == np.bool_:
        return reduce == "min"
    low, high = (
        (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if np.issubdtype(dtype, np.integer)
        else (-np.inf, np.inf)
    )
    return dtype.type(low if reduce == "max" else high)


def _combine(reduce: ReduceOp, a: Array, b: Array) -> Array:
    ops = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
    return np.asarray(ops[reduce](a, b))


def _open_mesh(at: list[Array]) -> Any:
    """Returns a NumPy index that selects the elements at these positions of each dimension: slices
    if all positions are contiguous, else arrays as of `np.ix_`."""
    if all(not len(i) or (i[-1] - i[0] + 1 == len(i) and (np.diff(i) == 1).all()) for i in at):
        return tuple(slice(int(i[0]), int(i[0]) + len(i)) if len(i) else slice(0, 0) for i in at)
    return np.ix_(*at)
