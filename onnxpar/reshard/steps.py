"""Single steps of a reshard: a collective, or a local cut, that moves sub-axes from one location to
another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from onnxpar.layout.layout import Factor, Product
from onnxpar.layout.mesh import Axes, Axis
from onnxpar.reshard.sub_axes import Location, Locations, Slot, leaves_at
from onnxpar.sharding.factors import TensorFactors, with_axes
from onnxpar.sharding.state import FactorSharding, covered_axes

PERMUTE = "CollectivePermute"
"""The kind of steps that only move whole shards between ranks (`permutes.py`)."""

Move = tuple[str, Axes, Location, Location]
"""A step: its kind, the sub-axes that it moves, and their location before and after it."""


@dataclass(frozen=True)
class ReshardStep:
    """One collective or local cut: `kind` over `axes`, from one factor sharding to another.

    LocalSlice keeps this rank's shard; Select keeps the value on coordinate 0 of `axes` and the
    neutral element of the reduction elsewhere (from whole to partial). `rows` is the number of
    contiguous runs that the step copies, as in `rows_moved`.
    """

    kind: str
    axes: Axes
    before: FactorSharding
    after: FactorSharding
    rows: int = 0


def moves(sub_axes: Sequence[Axis], locations: Locations, factors: TensorFactors) -> Iterator[Move]:
    """Yields all single steps: each moves some sub-axes from one common location to another."""
    for n in range(1, len(sub_axes) + 1):
        for run in combinations(range(len(sub_axes)), n):
            common = [w for w in locations[run[0]] if all(w in locations[i] for i in run)]
            axes = tuple(sub_axes[i] for i in run)
            for source in common:
                for target in common:
                    kind = step_kind(axes, source, target, factors)
                    if kind:
                        yield kind, axes, source, target


def step_kind(axes: Axes, source: Location, target: Location, factors: TensorFactors) -> str | None:
    """The collective or local cut that moves axes from one location to another; None if no single
    step does."""
    if source == target or not (_is_known(source, factors) and _is_known(target, factors)):
        return None
    if source is None:
        return "Select" if isinstance(target, str) else "LocalSlice"
    if isinstance(source, str):
        if target is None:
            return "AllReduce"
        scatters = isinstance(target, tuple) and _may_scatter(target, axes, factors)
        return "ReduceScatter" if scatters else None
    if target is None:
        return "AllGather"
    if isinstance(target, str):
        return None
    dims = factors.dim_of_leaf
    if dims[source[0]] != dims[target[0]]:
        covers = _covers(source, axes, factors) and _may_scatter(target, axes, factors)
        return "AllToAll" if covers else None
    if set(source) > set(target):
        return "AllGather"
    return "LocalSlice" if set(source) < set(target) else None


def _is_known(location: Location, factors: TensorFactors) -> bool:
    """True if the bounds of shards at this location are known. In a dimension of data-dependent
    size, they are known only if each shard is contiguous."""
    if factors.open.isdisjoint(leaves_at(location)):
        return True
    assert isinstance(location, tuple)
    dim = factors.dims[factors.dim_of_leaf[location[0]]]
    children = dim.children if isinstance(dim, Product) else (dim,)
    major = next(c for c in children if not isinstance(c, Factor) or c.is_leaf)
    first = factors.dim_of_leaf.index(factors.dim_of_leaf[location[0]])
    return location == (first,) and isinstance(major, Factor)


def _may_scatter(slot: Slot, axes: Axes, factors: TensorFactors) -> bool:
    """True if a collective can scatter shards to a slot: they must cover all elements and, if the
    size is data-dependent, be as equal as possible."""
    dim = factors.dims[factors.dim_of_leaf[slot[0]]]
    is_even = isinstance(dim, Factor) and len(axes) == 1
    return _covers(slot, axes, factors) and (is_even or factors.open.isdisjoint(slot))


def _covers(slot: Slot, axes: Axes, factors: TensorFactors) -> bool:
    """True if axes on a slot split every element of its dimension."""
    given = iter([(axes if i in slot else (), None) for i in range(len(factors.leaves))])
    dims = [with_axes(dim, given) for dim in factors.dims]
    return covered_axes(dims[factors.dim_of_leaf[slot[0]]]) is not None
