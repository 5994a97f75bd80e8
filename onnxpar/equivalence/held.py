"""What the tensors of ranks stand for: parts of the model's tensors, or of sums."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from onnxpar.equivalence.spans import Family

MOST_HELD = 6
"""The most ways in which one tensor of ranks stands for one tensor of the model."""


@dataclass(frozen=True)
class Partial:
    """A reduction of which each rank has a part: that of the positions `family` of a dimension of
    `size` elements. Ranks that together hold each position once have the whole result."""

    op: str
    family: Family
    size: int


@dataclass(frozen=True)
class Held:
    """A tensor of ranks that stands for a tensor of the model: `name` on rank r is `term` at the
    positions that `dims` has for r; with `partial`, it is r's part of that."""

    term: str
    name: str
    dims: tuple[Family, ...]
    partial: tuple[Partial, ...] = ()

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """True if each rank holds the whole tensor, which has this shape."""
        dims = zip(self.dims, shape, strict=True)
        return not self.partial and all(family.is_whole(size) for family, size in dims)

    def at(self, rank: int) -> tuple[int, ...]:
        """What tells whether two ranks hold the same positions."""
        return tuple(id(family.spans[rank]) for family in self.dims)


class Relations:
    """All that is proved so far."""

    def __init__(self) -> None:
        self.by_term: dict[str, list[Held]] = defaultdict(list)
        self.by_name: dict[str, list[Held]] = defaultdict(list)

    def add(self, held: Held) -> bool:
        """Adds a relation; False if it is known, or if there are enough of these tensors."""
        same = [h for h in self.by_name[held.name] if h.term == held.term]
        if held in same or len(same) >= MOST_HELD:
            return False
        self.by_term[held.term].append(held)
        self.by_name[held.name].append(held)
        return True

    def of(self, term: str, name: str) -> list[Held]:
        """The ways in which a tensor of ranks stands for a tensor of the model."""
        return [held for held in self.by_name.get(name, ()) if held.term == term]
