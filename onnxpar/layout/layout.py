"""Layouts: how each rank holds its part of a global tensor.

A dimension is a tree: a concatenation of segments, each a product of factors, each factor split
over an ordered list of mesh axes. `indices` gives its whole meaning: which global positions a
rank holds, in which order. Everything else here is derived from that or faster than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.layout.mesh import Axes, Axis, Mesh, in_mesh_order, merge_axes, parts_over

ReduceOp = Literal["sum", "max", "min", "prod"]


@lru_cache(maxsize=65536)
def nested_parts(size: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Part sizes by default: split by the first count, then each part by the next, larger first.

    >>> nested_parts(5, (2, 2))
    (2, 1, 1, 1)
    """
    parts: tuple[int, ...] = (size,)
    for n in counts:
        parts = tuple(p // n + (i < p % n) for p in parts for i in range(n))
    return parts


@dataclass(frozen=True)
class Factor:
    """An index variable: `size` elements, split over `axes`, by default in nested parts.

    A part may be empty. With `filled`, a rank whose part is empty computes on a stand-in, one
    element that its results leave out again; layouts of tensors are never filled.
    """

    size: int
    axes: Axes = ()
    parts: tuple[int, ...] | None = None
    filled: bool = False

    @property
    def is_leaf(self) -> bool:
        """Whether it can be split: of one element there is nothing to split."""
        return self.size > 1

    def part_sizes(self) -> tuple[int, ...]:
        """The size of each part, in the row-major order of the axes."""
        sizes = self.parts or nested_parts(self.size, tuple(a.size for a in self.axes))
        return tuple(max(s, 1) for s in sizes) if self.filled and self.size else sizes

    def part(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """Start and size of a rank's part; a stand-in is an element next to where it would be."""
        if not self.axes:
            return 0, self.size
        sizes = self.parts or nested_parts(self.size, tuple(a.size for a in self.axes))
        at = mesh.coordinate(self.axes, rank)
        start, size = sum(sizes[:at]), sizes[at]
        if self.filled and self.size and not size:
            return min(start, self.size - 1), 1
        return start, size


class SizedFactor(Factor):
    """A factor that can be split, at another size than the one that this was found for: it may have
    one element or none there."""

    @property
    def is_leaf(self) -> bool:
        return True


@dataclass(frozen=True)
class Product:
    """Factors merged into one dimension, the major one first: `(b h)` in einsum-like text."""

    children: tuple[Dim, ...]

    @property
    def size(self) -> int:
        return math.prod(c.size for c in self.children)


@dataclass(frozen=True)
class Concat:
    """Segments that stand one behind the other in a dimension: `q + k + v`."""

    children: tuple[Dim, ...]

    @property
    def size(self) -> int:
        return sum(c.size for c in self.children)


Dim = Factor | Product | Concat


def leaves(dim: Dim) -> Iterator[Factor]:
    """The factors of a dimension, from the first to the last."""
    if isinstance(dim, Factor):
        yield dim
    else:
        for child in dim.children:
            yield from leaves(child)


def dim_axes(dim: Dim) -> tuple[Axis, ...]:
    """Every axis that splits some factor of the dimension, each once."""
    return tuple(dict.fromkeys(axis for leaf in leaves(dim) for axis in leaf.axes))


def local_size(dim: Dim, mesh: Mesh, rank: int) -> int:
    """How many elements of the dimension a rank holds."""
    if isinstance(dim, Factor):
        return dim.part(mesh, rank)[1]
    sizes = [local_size(c, mesh, rank) for c in dim.children]
    return math.prod(sizes) if isinstance(dim, Product) else sum(sizes)


def estimated_size(dim: Dim, mesh: Mesh, rank: int) -> int:
    """The same where costs are reckoned: a size that only data decides, which factors have as -1,
    counts as 1."""
    return abs(local_size(dim, mesh, rank))


def is_data_dependent(dim: Dim) -> bool:
    """Whether only data decides the size of the dimension, which its one factor then has as -1."""
    return isinstance(dim, Factor) and dim.size < 0


def indices(dim: Dim, mesh: Mesh, rank: int) -> Array:
    """The global positions that a rank holds, in the order in which it holds them (int64)."""
    if isinstance(dim, Factor):
        start, size = dim.part(mesh, rank)
        return np.arange(start, start + size)
    if isinstance(dim, Concat):
        offsets = np.cumsum([0] + [c.size for c in dim.children])
        parts = [
            indices(c, mesh, rank) + o for c, o in zip(dim.children, offsets[:-1], strict=True)
        ]
        return np.concatenate(parts)
    at = np.zeros(1, np.int64)
    for child in dim.children:
        at = (at[:, None] * child.size + indices(child, mesh, rank)[None, :]).reshape(-1)
    return at


def first_index(dim: Dim, mesh: Mesh, rank: int) -> int:
    """The first position that a rank holds, of any number; where it would be, if it holds none."""
    if isinstance(dim, Factor):
        return dim.part(mesh, rank)[0]
    at = 0
    for child in dim.children:
        first = first_index(child, mesh, rank)
        if isinstance(dim, Product):
            at = at * child.size + first
        elif local_size(child, mesh, rank):
            return at + first
        else:
            at += child.size
    return at


def runs(dim: Dim, mesh: Mesh, rank: int) -> list[tuple[int, int]]:
    """The same positions as maximal runs (start, length), in order."""
    at = indices(dim, mesh, rank)
    if not len(at):
        return []
    cuts = np.flatnonzero(np.diff(at) != 1) + 1
    bounds = np.concatenate([[0], cuts, [len(at)]])
    return [(int(at[a]), int(b - a)) for a, b in pairwise(bounds)]


def normalize(dim: Dim) -> Dim:
    """The shortest tree of the same meaning; equal meanings of usual trees become equal values."""
    if isinstance(dim, Factor):
        axes = merge_axes(dim.axes)
        default = nested_parts(dim.size, tuple(a.size for a in axes))
        return Factor(dim.size, axes, None if dim.part_sizes() == default else dim.part_sizes())
    kind = type(dim)
    children: list[Dim] = []
    for child in map(normalize, dim.children):
        children += child.children if isinstance(child, kind) else [child]
    return _product(children) if kind is Product else _concat(children)


def _product(children: list[Dim]) -> Dim:
    out: list[Dim] = []
    for child in children:
        if child.size == 1 and not dim_axes(child):
            continue
        joined = _join_factors(out[-1], child) if out else None
        if joined:
            out[-1] = joined
        else:
            out.append(child)
    return out[0] if len(out) == 1 else Product(tuple(out)) if out else Factor(1)


def _join_factors(major: Dim, minor: Dim) -> Factor | None:
    """(whole whole) and (split whole) are one factor."""
    if not isinstance(major, Factor) or not isinstance(minor, Factor) or minor.axes:
        return None
    if not major.axes:
        return Factor(major.size * minor.size)
    parts = tuple(p * minor.size for p in major.part_sizes())
    joined = normalize(Factor(major.size * minor.size, major.axes, parts))
    assert isinstance(joined, Factor)
    return joined


def _concat(children: list[Dim]) -> Dim:
    out: list[Dim] = []
    for child in children:
        last = out[-1] if out else None
        if not child.size:
            continue
        if isinstance(last, Factor) and isinstance(child, Factor) and not last.axes + child.axes:
            out[-1] = Factor(last.size + child.size)
        else:
            out.append(child)
    return out[0] if len(out) == 1 else Concat(tuple(out)) if out else Factor(0)


@dataclass(frozen=True)
class Layout:
    """A layout per dimension, and the axes over which the tensor is partial.

    `partial` axes hold terms whose `reduce` over the ranks is the value.
    """

    dims: tuple[Dim, ...]
    partial: Axes = ()
    reduce: ReduceOp = "sum"

    @staticmethod
    def whole(shape: Sequence[int]) -> Layout:
        """Every rank holds all of it."""
        return Layout(tuple(Factor(int(s)) for s in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(d.size for d in self.dims)

    @property
    def axes(self) -> Axes:
        """All axes in use, for splitting or pending reduction."""
        return tuple(a for d in self.dims for a in dim_axes(d)) + self.partial

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of it."""
        return not self.axes

    def reduced(self) -> Layout:
        """The same without the pending reduction."""
        return replace(self, partial=(), reduce="sum") if self.partial else self

    def normalized(self) -> Layout:
        """The shortest trees of the same meaning, for comparison and for people."""
        return Layout(
            tuple(normalize(d) for d in self.dims),
            merge_axes(in_mesh_order(self.partial)),
            self.reduce if self.partial else "sum",
        )

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of a rank's part."""
        return tuple(local_size(d, mesh, rank) for d in self.dims)

    def estimated_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The same where costs are reckoned."""
        return tuple(estimated_size(d, mesh, rank) for d in self.dims)

    def take(self, whole: Array, mesh: Mesh, rank: int) -> Array:
        """A rank's part of a global array: a view where that is possible.

        A partial layout keeps the value on coordinate 0 of its axes and the neutral element
        elsewhere.
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
        """The global array from every rank's part, in rank order; each part is written once."""
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
        """`[dp, -] sum(tp)`: the form used in every dump, table and error."""
        tidy = self.normalized()
        out = "[" + ", ".join(_dim_text(d, mesh) for d in tidy.dims) + "]"
        if self.partial:
            out += f" {tidy.reduce}({'.'.join(mesh.text(a) for a in tidy.partial)})"
        return out

    def to_json(self, normalized: bool = True) -> dict[str, Any]:
        """Plain lists and dicts, read back by `from_json`; the tree as it is, or the shortest."""
        tidy = self.normalized() if normalized else self
        return {
            "dims": [_dim_json(d) for d in tidy.dims],
            "partial": [_axis_json(a) for a in self.partial],
            "reduce": self.reduce,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        """The inverse of `to_json`."""
        dims = tuple(_dim_of_json(d) for d in data["dims"])
        return Layout(dims, tuple(Axis(*a) for a in data["partial"]), data["reduce"])


def neutral(reduce: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """The element that changes nothing under the reduction."""
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
    """An index of contiguous slices where all dimensions allow it, else an open mesh."""
    if all(not len(i) or (i[-1] - i[0] + 1 == len(i) and (np.diff(i) == 1).all()) for i in at):
        return tuple(slice(int(i[0]), int(i[0]) + len(i)) if len(i) else slice(0, 0) for i in at)
    return np.ix_(*at)


def _dim_text(dim: Dim, mesh: Mesh, nested: bool = False) -> str:
    if isinstance(dim, Factor):
        if not dim.axes:
            return str(dim.size) if nested else "-"
        text = ".".join(mesh.text(a) for a in dim.axes)
        if dim.parts:
            text += "{" + ",".join(map(str, dim.parts)) + "}"
        return text
    joint = "*" if isinstance(dim, Product) else "+"
    text = joint.join(_dim_text(c, mesh, True) for c in dim.children)
    return f"({text})" if nested else text


def _axis_json(axis: Axis) -> list[Any]:
    return [axis.name, axis.size, axis.pre]


def _dim_json(dim: Dim) -> Any:
    if isinstance(dim, Factor):
        out: dict[str, Any] = {"size": dim.size}
        if dim.axes:
            out["axes"] = [_axis_json(a) for a in dim.axes]
        if dim.parts:
            out["parts"] = list(dim.parts)
        return out
    key = "product" if isinstance(dim, Product) else "concat"
    return {key: [_dim_json(c) for c in dim.children]}


def _dim_of_json(data: Mapping[str, Any]) -> Dim:
    if "product" in data:
        return Product(tuple(_dim_of_json(c) for c in data["product"]))
    if "concat" in data:
        return Concat(tuple(_dim_of_json(c) for c in data["concat"]))
    parts = tuple(data["parts"]) if "parts" in data else None
    return Factor(data["size"], tuple(Axis(*a) for a in data.get("axes", [])), parts)


def split_count(dim: Dim) -> int:
    """Into how many parts the dimension is split."""
    return parts_over(dim_axes(dim))
