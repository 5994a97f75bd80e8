"""Cuts mesh axes into sub-axes, so that each sub-axis has one location in every factor sharding
of a tensor: tp=4 becomes tp:(1)2 and tp:(2)2 if a sharding splits one leaf by 2 and another leaf
by 2."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from onnxpar.layout.layout import ReduceOp
from onnxpar.layout.mesh import Axes, Axis
from onnxpar.sharding.factors import TensorFactors
from onnxpar.sharding.state import FactorSharding

Slot = tuple[int, ...]
"""Leaves of one dimension that a sub-axis splits together: one leaf, or one leaf per segment."""


class HeldSlot(tuple[int, ...]):
    """A slot that a sub-axis (a factor of a mesh axis) does not divide: ranks at one coordinate of
    the sub-axis, `at`, hold the slot's leaves (parts of dimensions) whole, and all other ranks hold
    nothing of them."""

    at: int

    @staticmethod
    def of(slot: Slot, at: int) -> HeldSlot:
        """Returns the leaves (parts of dimensions) of a slot, held at the coordinate `at`."""
        held = HeldSlot(slot)
        held.at = at
        return held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeldSlot) and self.at == other.at and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.at))


Location = Slot | ReduceOp | None
"""The location of a sub-axis: on the leaves of a slot, in a partial reduction, or unused (None)."""
Locations = Sequence[Sequence[Location]]
"""The possible locations of each sub-axis."""


class Unordered(Exception):
    """No order of the sub-axes (factors of mesh axes) agrees with their order on every leaf (a part
    of a dimension); or sub-axes overlap; or no path leads from one factor sharding to another."""


Cuts = dict[str, tuple[int, ...]]
"""For each mesh axis, the products of sub-axis sizes at which it is cut, from 1 up: (1, 2, 4) cuts
an axis of size 4 into two sub-axes of size 2."""


def cuts_of(axes: Iterable[Axes]) -> Cuts:
    """Cuts each mesh axis so finely that each of `axes` consists of whole sub-axes (factors of mesh
    axes). Errors: Unordered if two of `axes` overlap and neither divides the other."""
    cuts: dict[str, set[int]] = {}
    for axis in (a for group in axes for a in group):
        cuts.setdefault(axis.name, set()).update((axis.pre, axis.pre * axis.size))
    ordered = {name: tuple(sorted(at)) for name, at in cuts.items()}
    if any(b % a for at in ordered.values() for a, b in pairwise(at)):
        raise Unordered
    return ordered


def cut(axes: Axes, cuts: Cuts) -> Axes:
    """Returns the sub-axes (factors of mesh axes) into which `cuts` divides all axes, in order,
    without coordinates `at`."""
    return tuple(sub_axis for sub_axis, _ in _cut(axes, cuts))


def _cut(axes: Axes, cuts: Cuts) -> Iterator[tuple[Axis, int | None]]:
    """Like `cut`; yields each sub-axis (a factor of a mesh axis) with its coordinate `at`, or None
    if its axis has no `at`."""
    for axis in axes:
        yield from _pieces(axis, cuts[axis.name])


@lru_cache(maxsize=1 << 12)
def _pieces(axis: Axis, cuts: tuple[int, ...]) -> tuple[tuple[Axis, int | None], ...]:
    """Returns the sub-axes (factors of mesh axes) of one axis that is cut at these sizes, each with
    its coordinate or None (see `_cut`)."""
    pieces = []
    for a, b in pairwise(c for c in cuts if axis.pre <= c <= axis.pre * axis.size):
        inner = axis.pre * axis.size // b
        at = None if axis.at is None else axis.at // inner % (b // a)
        pieces.append((Axis(axis.name, b // a, a), at))
    return tuple(pieces)


def located(sub_axis: Axis, location: Location) -> Axis:
    """Returns the sub-axis (a factor of a mesh axis) as the leaves (parts of dimensions) of a
    location have it: with the coordinate `at` if ranks at one coordinate hold these leaves whole (a
    HeldSlot)."""
    return replace(sub_axis, at=location.at) if isinstance(location, HeldSlot) else sub_axis


def locations_in(
    factor_sharding: FactorSharding, cuts: Cuts, factors: TensorFactors
) -> dict[Axis, Location]:
    """Returns the location of each sub-axis (a factor of a mesh axis) that a factor sharding uses.
    Errors: Unordered if a sub-axis divides some segments of a dimension, but ranks at one of its
    coordinates hold other segments."""
    slots: dict[Axis, Slot] = defaultdict(tuple)
    for leaf, axes in enumerate(factor_sharding.leaves):
        for sub_axis, at in _cut(axes, cuts):
            before = slots[sub_axis]
            if before and getattr(before, "at", None) != at:
                raise Unordered
            slot = (*before, leaf)
            slots[sub_axis] = slot if at is None else HeldSlot.of(slot, at)
    assert all(len({factors.dim_of_leaf[i] for i in slot}) == 1 for slot in slots.values())
    return {
        **slots,
        **dict.fromkeys(cut(factor_sharding.partial, cuts), factor_sharding.reduce),
    }


def ordered(chains: Iterable[Axes], by_sharding: Iterable[Mapping[Axis, Location]]) -> list[Axis]:
    """Returns all sub-axes in an order that agrees with their order on every leaf (a part of a
    dimension).

    chains       sub-axes in the order that a leaf has them
    by_sharding  for each factor sharding, the location of each sub-axis (a factor of a mesh axis)

    Errors: Unordered if there is no such order.
    """
    sorter: TopologicalSorter[Axis] = TopologicalSorter()
    added: set[Axis] = set()
    for locations in by_sharding:
        for sub_axis in sorted(locations.keys() - added, key=lambda a: (a.name, a.pre)):
            sorter.add(sub_axis)
        added.update(locations)
    for chain in chains:
        for before, after in pairwise(chain):
            sorter.add(after, before)
    try:
        return list(sorter.static_order())
    except CycleError:
        raise Unordered from None


def leaves_at(location: Location) -> frozenset[int]:
    """Returns the leaves (parts of dimensions) of a location; none for a reduction or an unused
    sub-axis (a factor of a mesh axis)."""
    return _leaves(tuple(location)) if isinstance(location, tuple) else frozenset()


_leaves = lru_cache(maxsize=1 << 12)(frozenset[int])
