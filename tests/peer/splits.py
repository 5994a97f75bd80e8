"""What is tried on a case: every input along every dimension, and pairs that a rule joins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxpar.layout.layout import Dim, Factor, leaves, nested_parts
from onnxpar.layout.mesh import Mesh
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.strategy.strategy import Strategy

AXIS = "x"
Place = tuple[str, int]
"""An input and one of its dimensions."""


@dataclass(frozen=True)
class Split:
    """Inputs that are fed split over one mesh axis, in default parts or in sizes by hand; parts may
    have no elements."""

    ranks: int
    places: tuple[Place, ...]
    parts: tuple[int, ...] | None = None

    def strategy(self, shapes: Mapping[str, Sequence[int]]) -> Strategy:
        """As a user would write it, for inputs of these shapes."""
        ask = AXIS if self.parts is None else {AXIS: list(self.parts)}
        tensors = {
            name: [ask if d == dim else None for d in range(len(shapes[name]))]
            for name, dim in self.places
        }
        return Strategy(Mesh.of([(AXIS, self.ranks)]), tensors=tensors)

    def __str__(self) -> str:
        where = " ".join(f"{name}.{dim}" for name, dim in self.places)
        sizes = "" if self.parts is None else f" as {'+'.join(map(str, self.parts))}"
        return f"{where} over {self.ranks}{sizes}"


MOST = 4
"""Ranks at most of a split over more ranks than a dimension has elements."""


def splits_of(inputs: Sequence[str], factors: GraphFactors) -> Iterator[Split]:
    """Every split of these inputs, then of pairs of inputs along dimensions of the same atoms."""
    places = [
        (name, dim)
        for name in inputs
        for dim, tree in enumerate(factors.tensors[name].dims)
        if tree.size >= 2
    ]
    for place in places:
        for ranks, parts in _parts(place, factors):
            yield Split(ranks, (place,), parts)
    for i, a in enumerate(places):
        for b in places[i + 1 :]:
            if a[0] != b[0] and _atoms(a, factors) & _atoms(b, factors):
                fewer = min(a, b, key=lambda place: _size(place, factors))
                for ranks in _ranks(fewer, factors):
                    yield Split(ranks, (a, b))


def _ranks(place: Place, factors: GraphFactors) -> list[int]:
    """2 and 3 ranks that all get elements, and as many that one or more get none."""
    enough = [ranks for ranks in (2, 3) if ranks <= _size(place, factors)]
    too_many = max(leaf.size for leaf in leaves(_dim(place, factors))) + 1
    return enough + [too_many] * (too_many <= MOST and too_many not in enough)


def _parts(place: Place, factors: GraphFactors) -> Iterator[tuple[int, tuple[int, ...] | None]]:
    """Numbers of ranks with default parts (None), and with others by hand: the default from behind
    where it is uneven, else 1 + ... and the rest; and none for rank 0, where the default leaves no
    rank without. Only where the dimension is one atom can they be asked for."""
    size, by_hand = _size(place, factors), isinstance(_dim(place, factors), Factor)
    for ranks in _ranks(place, factors):
        yield ranks, None
        if by_hand and size > ranks:
            default = nested_parts(size, (ranks,))
            ones = (*[1] * (ranks - 1), size - ranks + 1)
            yield ranks, default[::-1] if len(set(default)) > 1 else ones
    if by_hand and size >= MOST:
        yield 3, (0, *nested_parts(size, (2,)))


def _dim(place: Place, factors: GraphFactors) -> Dim:
    return factors.tensors[place[0]].dims[place[1]]


def _size(place: Place, factors: GraphFactors) -> int:
    return _dim(place, factors).size


def _atoms(place: Place, factors: GraphFactors) -> set[int]:
    tensor = factors.tensors[place[0]]
    return {
        leaf.atom
        for leaf, dim in zip(tensor.leaves, tensor.dim_of_leaf, strict=True)
        if dim == place[1]
    }
