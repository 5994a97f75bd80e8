"""Cuts mesh axes into sub-axes, so that each sub-axis has one location in every factor sharding."""

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
    """A slot that a sub-axis does not divide: ranks at one coordinate of the sub-axis hold the
    slot's leaves whole.

    at  this coordinate
    """

    at: int

    @staticmethod
    def of(slot: Slot, at: int) -> HeldSlot:
        """The leaves of a slot, at a coordinate."""
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
"""The location of a sub-axis: on leaves, in a partial reduction, or unused."""
Locations = Sequence[Sequence[Location]]
"""The possible locations of each sub-axis."""


class Unordered(Exception):
    """No order of the sub-axes agrees with their order on every leaf; or sub-axes overlap; or no
    path leads from one factor sharding to another."""


Cuts = dict[str, tuple[int, ...]]
"""The sizes at which each mesh axis is cut, from the major end on."""


def cuts_of(axes: Iterable[Axes]) -> Cuts:
    """Cuts each mesh axis so finely that every used axis or sub-axis is a union of cut ones.
    Errors: Unordered if two overlap and neither divides the other."""
    cuts: dict[str, set[int]] = {}
    for axis in (a for group in axes for a in group):
        cuts.setdefault(axis.name, set()).update((axis.pre, axis.pre * axis.size))
    ordered = {name: tuple(sorted(at)) for name, at in cuts.items()}
    if any(b % a for at in ordered.values() for a, b in pairwise(at)):
        raise Unordered
    return ordered


def cut(axes: Axes, cuts: Cuts) -> Axes:
    """The sub-axes of all axes, in order, without `at`."""
    return tuple(sub_axis for sub_axis, _ in _cut(axes, cuts))


def _cut(axes: Axes, cuts: Cuts) -> Iterator[tuple[Axis, int | None]]:
    """Yields the sub-axes of axes, each with its coordinate if its axis has `at`, else None."""
    for axis in axes:
        yield from _pieces(axis, cuts[axis.name])


@lru_cache(maxsize=1 << 12)
def _pieces(axis: Axis, cuts: tuple[int, ...]) -> tuple[tuple[Axis, int | None], ...]:
    """The sub-axes of one axis that is cut at these sizes; see `_cut`."""
    pieces = []
    for a, b in pairwise(c for c in cuts if axis.pre <= c <= axis.pre * axis.size):
        inner = axis.pre * axis.size // b
        at = None if axis.at is None else axis.at // inner % (b // a)
        pieces.append((Axis(axis.name, b // a, a), at))
    return tuple(pieces)


def located(sub_axis: Axis, location: Location) -> Axis:
    """The sub-axis as the leaves of a location have it: with `at` for a HeldSlot."""
    return replace(sub_axis, at=location.at) if isinstance(location, HeldSlot) else sub_axis


def locations_in(
    factor_sharding: FactorSharding, cuts: Cuts, factors: TensorFactors
) -> dict[Axis, Location]:
    """The location of each sub-axis that a factor sharding uses. Errors: Unordered if a sub-axis
    divides some segments, but ranks at one of its coordinates hold other segments."""
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
    """All sub-axes in an order that agrees with their order on every leaf. Errors: Unordered."""
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
    """The leaves of a location; none for a reduction or an unused sub-axis."""
    return _leaves(tuple(location)) if isinstance(location, tuple) else frozenset()


_leaves = lru_cache(maxsize=1 << 12)(frozenset[int])
