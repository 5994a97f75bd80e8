"""Single steps of a reshard: a collective or a local cut moves sub-axes of the mesh from one
location (leaves of the tensor, a partial reduction, or unused) to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.layout.layout import Concat, Dim, Factor, Product
from onnxpar.layout.mesh import Axes
from onnxpar.sharding.factors import TensorFactors, with_axes
from onnxpar.sharding.state import FactorSharding, covered_axes
from onnxpar.sharding.sub_axes import Location, Slot, leaves_at

PERMUTE = "CollectivePermute"
"""The kind of steps that move only whole shards between ranks (`permutes.py`)."""


@dataclass(frozen=True)
class ReshardStep:
    """One collective or local cut: `kind` over `axes`, from one factor sharding to another.

    LocalSlice keeps this rank's shard. Select turns a whole value into a partial one: ranks at
    coordinate 0 of `axes` keep the value, and all others get the neutral element of the reduction
    (0 for a sum). `rows` is the number of contiguous runs that the step copies, as in `rows_moved`.
    """

    kind: str
    axes: Axes
    before: FactorSharding
    after: FactorSharding
    rows: int = 0


class StepKinds:
    """Tells which collective or local cut moves sub-axes (factors of mesh axes) of a tensor with
    these factors from one location to another."""

    def __init__(self, factors: TensorFactors) -> None:
        self.factors = factors
        self._has_segments = [any(_segments(dim)) for dim in factors.dims]
        self._covered: dict[tuple[Slot, Axes], bool] = {}

    def table(self, axes: Axes, locations: Sequence[Location]) -> tuple[list[str], Array]:
        """Returns the kinds of steps that move `axes` between these locations, and a matrix
        [location before, location after] of indices into these kinds; -1 if no single step leads
        there."""
        numbers: dict[str | None, int] = {None: -1}
        rows = [
            [numbers.setdefault(self.of(axes, a, b), len(numbers) - 1) for b in locations]
            for a in locations
        ]
        shape = (len(locations), len(locations))
        return [kind for kind in numbers if kind is not None], np.array(rows, int).reshape(shape)

    def of(self, axes: Axes, source: Location, target: Location) -> str | None:
        """Returns the kind of the step that moves `axes` from one location to another; None if no
        single step does. From a leaf (a part of a dimension) to unused it is AllGather, from a leaf
        to a leaf of another dimension AllToAll, from a partial sum (each rank holds one term) to
        unused AllReduce."""
        factors = self.factors
        if source == target:
            return None
        if factors.open and not (_is_known(source, factors) and _is_known(target, factors)):
            return None
        if source is None:
            return "Select" if isinstance(target, str) else "LocalSlice"
        if isinstance(source, str):
            if target is None:
                return "AllReduce"
            scatters = isinstance(target, tuple) and self._may_scatter(target, axes)
            return "ReduceScatter" if scatters else None
        if target is None:
            return "AllGather"
        if isinstance(target, str):
            return None
        dims = factors.dim_of_leaf
        if dims[source[0]] != dims[target[0]]:
            covers = self._covers(source, axes) and self._may_scatter(target, axes)
            return "AllToAll" if covers else None
        if set(source) > set(target):
            return "AllGather"
        return "LocalSlice" if set(source) < set(target) else None

    def _may_scatter(self, slot: Slot, axes: Axes) -> bool:
        """True if a collective (reduce-scatter or all-to-all) can cut a tensor over `axes` at a
        slot: the shards cover all elements and, if the size is data-dependent, are as equal as
        possible."""
        dim = self.factors.dims[self.factors.dim_of_leaf[slot[0]]]
        is_even = isinstance(dim, Factor) and len(axes) == 1
        return self._covers(slot, axes) and (is_even or self.factors.open.isdisjoint(slot))

    def _covers(self, slot: Slot, axes: Axes) -> bool:
        """True if `axes` on a slot split every element of its dimension: a slot may have leaves
        (parts of dimensions) in only some of the dimension's segments."""
        if not self._has_segments[self.factors.dim_of_leaf[slot[0]]]:
            return True
        key = (slot, axes)
        if key not in self._covered:
            number = self.factors.dim_of_leaf[slot[0]]
            leaves = (i for i, dim in enumerate(self.factors.dim_of_leaf) if dim == number)
            splits = iter([(axes if i in slot else (), None) for i in leaves])
            split = with_axes(self.factors.dims[number], splits)
            self._covered[key] = covered_axes(split) is not None
        return self._covered[key]


def _segments(dim: Dim) -> Iterator[Concat]:
    """Yields the concatenations in a dimension."""
    if isinstance(dim, Concat):
        yield dim
    for child in () if isinstance(dim, Factor) else dim.children:
        yield from _segments(child)


def _is_known(location: Location, factors: TensorFactors) -> bool:
    """True if the bounds of shards at this location are known before a run. In a dimension of
    data-dependent size, the bounds are known only if each shard is contiguous."""
    if factors.open.isdisjoint(leaves_at(location)):
        return True
    assert isinstance(location, tuple)
    dim = factors.dims[factors.dim_of_leaf[location[0]]]
    children = dim.children if isinstance(dim, Product) else (dim,)
    major = next(c for c in children if not isinstance(c, Factor) or c.is_leaf)
    first = factors.dim_of_leaf.index(factors.dim_of_leaf[location[0]])
    return location == (first,) and isinstance(major, Factor)
