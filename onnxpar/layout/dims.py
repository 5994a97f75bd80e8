"""Dimensions of layouts: trees of segments and factors that mesh axes split.

A dimension is a concatenation of segments, each a product of factors, each factor split over an
ordered list of mesh axes. `indices` defines what such a tree means: the global positions of a
rank's elements along the dimension, in the rank's order. All other functions follow from `indices`,
or compute the same faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.layout.mesh import Axes, Axis, Mesh, merge_axes, parts_over, plain
from onnxpar.layout.shares import Proportion


@lru_cache(maxsize=65536)
def nested_parts(size: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the default sizes of shards: divides `size` elements into `counts[0]` parts, then
    each part into `counts[1]` parts, and so on. If a division leaves a remainder, the first parts
    have one element more.

    >>> nested_parts(5, (2, 2))
    (2, 1, 1, 1)
    """
    parts: tuple[int, ...] = (size,)
    for n in counts:
        parts = tuple(p // n + (i < p % n) for p in parts for i in range(n))
    return parts


@lru_cache(maxsize=65536)
def default_parts(size: int, axes: Axes) -> tuple[int, ...]:
    """Returns the default sizes of the shards of `size` elements over axes, in row-major order of
    the axes, as `nested_parts` does; but an axis with `at` puts all elements at that coordinate.

    >>> default_parts(5, (Axis("dp", 2), Axis("tp", 2, at=1)))
    (0, 3, 0, 2)
    """
    if all(axis.at is None for axis in axes):
        return nested_parts(size, tuple(axis.size for axis in axes))
    parts: tuple[int, ...] = (size,)
    for axis in axes:
        if axis.at is None:
            parts = tuple(n for p in parts for n in nested_parts(p, (axis.size,)))
        else:
            parts = tuple(p if i == axis.at else 0 for p in parts for i in range(axis.size))
    return parts


@dataclass(frozen=True)
class Factor:
    """A dimension, or part of one, of `size` elements that is split over `axes` as a unit.
    `Factor(6, (Axis("tp", 2),))` means 3 elements on each rank.

    parts   the sizes of the shards, in row-major order of the axes; a Proportion divides any size
            in the ratio of its weights; None: `default_parts`
    filled  ranks with an empty shard compute on one neighbouring element instead (a stand-in), and
            then drop its result, for ops that accept no empty tensors; never set in layouts of
            tensors
    """

    size: int
    axes: Axes = ()
    parts: tuple[int, ...] | Proportion | None = None
    filled: bool = False

    @property
    def is_leaf(self) -> bool:
        """True if axes may split the factor: it has more than one element."""
        return self.size > 1

    def part_sizes(self) -> tuple[int, ...]:
        """The size of each shard, in the row-major order of the axes."""
        sizes = self._sizes()
        return tuple(max(s, 1) for s in sizes) if self.filled and self.size else sizes

    def part(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """Returns (start, size) of a rank's shard. With `filled`, for an empty shard: of its
        stand-in, an element next to where the shard would be."""
        if not self.axes:
            return 0, self.size
        sizes = self._sizes()
        at = mesh.coordinate(self.axes, rank)
        start, size = sum(sizes[:at]), sizes[at]
        if self.filled and self.size and not size:
            return min(start, self.size - 1), 1
        return start, size

    def _sizes(self) -> tuple[int, ...]:
        if isinstance(self.parts, Proportion):
            return self.parts.sizes(self.size)
        return self.parts or default_parts(self.size, self.axes)


class SizedFactor(Factor):
    """A factor with the size of one run, where a dimension is open. `is_leaf` stays true even for a
    size of 0 or 1, because the dimension can be split at the sizes for which the compiler analysed
    the graph."""

    @property
    def is_leaf(self) -> bool:
        return True


@dataclass(frozen=True)
class Product:
    """A dimension that is a row-major product of smaller ones, the major one first: `(b h)` in the
    notation of rules. `[b, h]` reshaped to `[b*h]` has one."""

    children: tuple[Dim, ...]

    @property
    def size(self) -> int:
        return math.prod(c.size for c in self.children)


@dataclass(frozen=True)
class Concat:
    """A dimension that is a concatenation of segments: `q + k + v` in the notation of rules. The
    columns of a fused QKV weight are one."""

    children: tuple[Dim, ...]

    @property
    def size(self) -> int:
        return sum(c.size for c in self.children)


Dim = Factor | Product | Concat


def leaves(dim: Dim) -> Iterator[Factor]:
    """Yields the factors in the tree of a dimension, from left to right."""
    if isinstance(dim, Factor):
        yield dim
    else:
        for child in dim.children:
            yield from leaves(child)


def dim_axes(dim: Dim) -> tuple[Axis, ...]:
    """Returns all axes that split any factor of the dimension, without duplicates."""
    return tuple(dict.fromkeys(axis for leaf in leaves(dim) for axis in leaf.axes))


def is_even(factor: Factor) -> bool:
    """True if all shards of the factor have the same size. False for a Proportion, whose shards may
    be equal at one size of the factor and unequal at another."""
    return not isinstance(factor.parts, Proportion) and len(set(factor.part_sizes())) == 1


def local_size(dim: Dim, mesh: Mesh, rank: int) -> int:
    """Returns the number of elements of the dimension that `rank` holds: 3 of 6 over tp=2."""
    if isinstance(dim, Factor):
        return dim.part(mesh, rank)[1]
    sizes = [local_size(c, mesh, rank) for c in dim.children]
    return math.prod(sizes) if isinstance(dim, Product) else sum(sizes)


def local_sizes(dim: Dim, mesh: Mesh, ranks: Array) -> Array:
    """`local_size` for an array of ranks: returns the number of elements that each of them
    holds."""
    if isinstance(dim, Factor):
        parts = np.array(dim.part_sizes() if dim.axes else (dim.size,))
        return np.asarray(parts[mesh.coordinate(dim.axes, ranks)])
    sizes = [local_sizes(child, mesh, ranks) for child in dim.children]
    return np.asarray((np.prod if isinstance(dim, Product) else np.sum)(sizes, axis=0))


def estimated_size(dim: Dim, mesh: Mesh, rank: int) -> int:
    """`local_size` for costs, where a data-dependent size (-1) counts as 1."""
    return abs(local_size(dim, mesh, rank))


def largest_size(dim: Dim) -> int:
    """Returns the number of elements of the dimension in its largest shard, for costs; a
    data-dependent size (-1) counts as 1. For a product of unevenly split factors, this is an upper
    bound: maybe no rank holds the largest shard of each factor. A dimension that only ranks at one
    coordinate hold (`at`) counts with the mean over all coordinates, because other tensors are at
    the other coordinates."""
    if isinstance(dim, Factor):
        if any(axis.at is not None for axis in dim.axes):
            return largest_size(Factor(dim.size, plain(dim.axes)))
        sizes = dim.part_sizes()
        return abs(max(sizes) if dim.parts else sizes[0])
    sizes_of_children = map(largest_size, dim.children)
    return (math.prod if isinstance(dim, Product) else sum)(sizes_of_children)


def is_data_dependent(dim: Dim) -> bool:
    """True if the size of the dimension is known only during a run (NonZero's): a single factor of
    size -1."""
    return isinstance(dim, Factor) and dim.size < 0


def indices(dim: Dim, mesh: Mesh, rank: int) -> Array:
    """Returns the global positions (int64) of the rank's elements along the dimension, in the
    rank's order. For 6 elements over tp=2, rank 1 has [3, 4, 5]."""
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
    """Returns the first of the rank's `indices`; for an empty shard, the position where it would
    start."""
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
    """Returns the `indices` of a rank as maximal ranges (start, length) of consecutive positions,
    in order: [0, 1, 2, 6, 7] becomes [(0, 3), (6, 2)]."""
    at = indices(dim, mesh, rank)
    if not len(at):
        return []
    cuts = np.flatnonzero(np.diff(at) != 1) + 1
    bounds = np.concatenate([[0], cuts, [len(at)]])
    return [(int(at[a]), int(b - a)) for a, b in pairwise(bounds)]


def normalize(dim: Dim) -> Dim:
    """Returns the shortest tree with the same `indices` on every rank. Two trees with equal indices
    usually, but not always, have equal normal forms."""
    if isinstance(dim, Factor):
        axes = merge_axes(dim.axes)
        if isinstance(dim.parts, Proportion):
            return Factor(dim.size, axes, dim.parts)
        default = default_parts(dim.size, axes)
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
    """Returns one factor with the same indices as the product of two adjacent dimensions; None if
    they are not both factors, or if the minor one is split."""
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


def dim_text(dim: Dim, mesh: Mesh, nested: bool = False) -> str:
    """The text of a dimension in `Layout.text`: the axes that split it (`dp.tp`), or `-` if it is
    whole. With `nested`, for a child in a tree: the size if the child is whole, so that the tree
    reads `(3+tp)`."""
    if isinstance(dim, Factor):
        if not dim.axes:
            return str(dim.size) if nested else "-"
        text = ".".join(mesh.text(a) for a in dim.axes)
        if dim.parts:
            text += "{" + _parts_text(dim.parts) + "}"
        return text
    joint = "*" if isinstance(dim, Product) else "+"
    text = joint.join(dim_text(c, mesh, True) for c in dim.children)
    return f"({text})" if nested else text


def _parts_text(parts: tuple[int, ...] | Proportion) -> str:
    return str(parts) if isinstance(parts, Proportion) else ",".join(map(str, parts))


def axis_json(axis: Axis) -> list[Any]:
    """An axis as a list for JSON: [name, size, pre], and a fourth entry `at` unless that is
    None."""
    return [axis.name, axis.size, axis.pre, *([] if axis.at is None else [axis.at])]


def dim_json(dim: Dim) -> Any:
    """A dimension as lists and dicts for JSON: `{"size": 6, "axes": [["tp", 2, 1]]}`, `{"product":
    [...]}`."""
    if isinstance(dim, Factor):
        out: dict[str, Any] = {"size": dim.size}
        if dim.axes:
            out["axes"] = [axis_json(a) for a in dim.axes]
        if isinstance(dim.parts, Proportion):
            out["weights"] = list(dim.parts.weights)
        elif dim.parts:
            out["parts"] = list(dim.parts)
        return out
    key = "product" if isinstance(dim, Product) else "concat"
    return {key: [dim_json(c) for c in dim.children]}


def dim_of_json(data: Mapping[str, Any]) -> Dim:
    """The inverse of `dim_json`. Errors: KeyError, TypeError or ValueError for anything else."""
    if "product" in data:
        return Product(tuple(dim_of_json(c) for c in data["product"]))
    if "concat" in data:
        return Concat(tuple(dim_of_json(c) for c in data["concat"]))
    parts: tuple[int, ...] | Proportion | None = None
    if "weights" in data:
        parts = Proportion(tuple(data["weights"]))
    elif "parts" in data:
        parts = tuple(data["parts"])
    for number in (data["size"], *(parts if isinstance(parts, tuple) else ())):
        if type(number) is not int:
            raise TypeError(f"a size is {number!r:.60}")
    return Factor(data["size"], tuple(Axis(*a) for a in data.get("axes", [])), parts)


def split_count(dim: Dim) -> int:
    """Returns the number of shards into which the dimension is split: the product of the sizes of
    its axes."""
    return parts_over(dim_axes(dim))
