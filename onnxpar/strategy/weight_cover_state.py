"""A set of atoms that covers weights, and its cost, during the search for the cheapest set."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

Event = tuple[str, str]
"""A collective: its kind, and the node or tensor that causes it."""


class CoverState:
    """A set of atoms (parts of dimensions) and its cost. The cost counts the collectives that
    splitting the atoms causes; the contractions that have two of the atoms, as only one can take
    the axes; and the segments of weights that no atom of the set splits.

    events     for each atom, the collectives that its split causes
    conflicts  for each atom, the number of contractions that it shares with each other atom
    segments   for each segment of a weight, the cost of leaving it uncovered, and the atoms that
               cover it
    usable     the atoms that ranks can split
    times      the cost of an event, in collectives, where it is not 1
    """

    def __init__(
        self,
        events: Mapping[int, set[Event]],
        conflicts: Mapping[int, Mapping[int, int]],
        segments: Sequence[tuple[float, frozenset[int]]],
        usable: set[int],
        times: Mapping[Event, int],
    ) -> None:
        self.events = events
        self.times = times
        self.conflicts = conflicts
        self.price = [price for price, _ in segments]
        self.holders: dict[int, list[int]] = defaultdict(list)
        for i, (_, atoms) in enumerate(segments):
            for atom in atoms & usable:
                self.holders[atom].append(i)
        self.chosen: set[int] = set()
        self.caused: Counter[Event] = Counter()
        self.covered: Counter[int] = Counter()
        for atom in self.holders:
            self._add(atom)

    def size(self, atom: int) -> float:
        """Returns the cost of leaving uncovered the segments that an atom (a part of a dimension)
        covers."""
        return sum(self.price[i] for i in self.holders[atom])

    @property
    def cost(self) -> float:
        """The cost of the set, in collectives."""
        met = sum(
            n for a in self.chosen for o, n in self.conflicts.get(a, {}).items() if o in self.chosen
        )
        uncovered = sum(price for i, price in enumerate(self.price) if not self.covered[i])
        caused = sum(self.times.get(e, 1) for e, n in self.caused.items() if n > 0)
        return caused + met / 2 + uncovered

    def order(self, by_cover: bool) -> list[int]:
        """Returns all atoms (parts of dimensions), the most expensive first: by the collectives
        that they cause or, with `by_cover`, by these collectives relative to the cost of the
        segments that they cover."""

        def key(atom: int) -> tuple[float, float, int]:
            count = sum(self.times.get(e, 1) for e in self.events.get(atom, ()))
            size = self.size(atom)
            return -count / ((size or 1) if by_cover else 1), size, atom

        return sorted(self.holders, key=key)

    def improve(self, order: Sequence[int]) -> None:
        """Prunes atoms (parts of dimensions) in this order, then tries to add each removed atom,
        until the set gets no cheaper."""
        self.prune(order)
        improved = True
        while improved:
            improved = any([self.try_adding(a) for a in order if a not in self.chosen])

    def _add(self, atom: int) -> None:
        """Adds an atom (a part of a dimension) to the set, whatever it costs."""
        self.chosen.add(atom)
        self.caused.update(self.events.get(atom, ()))
        self.covered.update(self.holders[atom])

    def _remove(self, atom: int) -> None:
        """Removes an atom (a part of a dimension) from the set, whatever it saves."""
        self.chosen.discard(atom)
        self.caused.subtract(self.events.get(atom, ()))
        self.covered.subtract(self.holders[atom])

    def gain(self, atom: int) -> float:
        """Returns the cost that the set saves if a chosen atom (a part of a dimension) is removed;
        negative if the set then costs more."""
        events = self.events.get(atom, ())
        saved: float = sum(self.times.get(e, 1) for e in events if self.caused[e] == 1)
        saved += sum(n for o, n in self.conflicts.get(atom, {}).items() if o in self.chosen)
        return saved - sum(self.price[i] for i in self.holders[atom] if self.covered[i] == 1)

    def prune(self, order: Iterable[int]) -> list[int]:
        """Removes, in this order, each atom (a part of a dimension) that costs at least as much as
        the segments that only it covers. Returns the removed atoms."""
        removed = []
        for atom in order:
            if atom in self.chosen and self.gain(atom) >= 0:
                self._remove(atom)
                removed.append(atom)
        return removed

    def try_adding(self, atom: int) -> bool:
        """Adds an atom (a part of a dimension) and removes atoms that it makes superfluous, if the
        set gets cheaper by this; else leaves the set as it is. True if the set got cheaper."""
        neighbours = {
            a for a in self.chosen if not set(self.holders[a]).isdisjoint(self.holders[atom])
        }
        self._add(atom)
        change = self.gain(atom)
        removed = []
        for other in sorted(neighbours, key=lambda a: (-self.gain(a), self.size(a), a)):
            gain = self.gain(other)
            if gain >= 0:
                change -= gain
                self._remove(other)
                removed.append(other)
        if change < -1e-9:
            return True
        for other in removed:
            self._add(other)
        self._remove(atom)
        return False
