"""Cuts mesh axes into sub-axes so fine that each has a single location in every factor sharding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from onnxpar.layout.layout import ReduceOp
from onnxpar.layout.mesh import Axes, Axis
from onnxpar.sharding.factors import TensorFactors
from onnxpar.sharding.state import FactorSharding

Slot = tuple[int, ...]
"""Leaves of one dimension that a sub-axis splits together: one, or one of each segment."""
Location = Slot | ReduceOp | None
"""The location of a sub-axis: on leaves, in a partial reduction, or unused."""
Locations = Sequence[Sequence[Location]]
"""The possible locations of each sub-axis."""


class Unordered(Exception):
    """Errors: no order of the sub-axes agrees with their order on every leaf, sub-axes overlap, or
    no path leads from one factor sharding to another."""


Cuts = dict[str, list[int]]
"""The sizes at which each mesh axis is cut, from the major end on."""


def cuts_of(axes: Iterable[Axes]) -> Cuts:
    """Cuts each mesh axis so finely that every sub-axis in use is a union of the cut ones. Errors:
    Unordered if two overlap and neither divides the other."""
    cuts: dict[str, set[int]] = {}
    for axis in (a for group in axes for a in group):
        cuts.setdefault(axis.name, set()).update((axis.pre, axis.pre * axis.size))
    ordered = {name: sorted(at) for name, at in cuts.items()}
    if any(b % a for at in ordered.values() for a, b in pairwise(at)):
        raise Unordered
    return ordered


def cut(axes: Axes, cuts: Cuts) -> Axes:
    """The axes, each replaced by its sub-axes."""
    sub_axes: list[Axis] = []
    for axis in axes:
        at = [c for c in cuts[axis.name] if axis.pre <= c <= axis.pre * axis.size]
        sub_axes += [Axis(axis.name, b // a, a) for a, b in pairwise(at)]
    return tuple(sub_axes)


def locations_in(
    factor_sharding: FactorSharding, cuts: Cuts, factors: TensorFactors
) -> dict[Axis, Location]:
    """The location of each sub-axis that a factor sharding uses."""
    slots: dict[Axis, Slot] = defaultdict(tuple)
    for leaf, axes in enumerate(factor_sharding.leaves):
        for sub_axis in cut(axes, cuts):
            slots[sub_axis] += (leaf,)
    assert all(len({factors.dim_of_leaf[i] for i in slot}) == 1 for slot in slots.values())
    return {
        **slots,
        **dict.fromkeys(cut(factor_sharding.partial, cuts), factor_sharding.reduce),
    }


def ordered(chains: Iterable[Axes], found: Iterable[Mapping[Axis, Location]]) -> list[Axis]:
    """All sub-axes in an order that agrees with their order on every leaf. Errors: Unordered."""
    sorter: TopologicalSorter[Axis] = TopologicalSorter()
    for locations in found:
        for sub_axis in sorted(locations, key=lambda a: (a.name, a.pre)):
            sorter.add(sub_axis)
    for chain in chains:
        for before, after in pairwise(chain):
            sorter.add(after, before)
    try:
        return list(sorter.static_order())
    except CycleError:
        raise Unordered from None


def leaves_at(location: Location) -> set[int]:
    """The leaves of a location; none if it is not on leaves."""
    return set(location) if isinstance(location, tuple) else set()
