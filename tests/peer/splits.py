"""What is tried on a case: every input along every dimension, and pairs that a rule joins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxpar.factors import GraphFactors
from onnxpar.layout import Factor, nested_parts
from onnxpar.mesh import Mesh
from onnxpar.strategy import Strategy

AXIS = "x"
Place = tuple[str, int]
"""An input and one of its dimensions."""


@dataclass(frozen=True)
class Split:
    """Inputs that are fed split over one mesh axis, in default parts or in sizes by hand."""

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


def splits_of(inputs: Sequence[str], factors: GraphFactors) -> Iterator[Split]:
    """Every split of these inputs, then of pairs of inputs along dimensions of the same atoms."""
    places = [
        (name, dim)
        for name in inputs
        for dim, tree in enumerate(factors.tensors[name].dims)
        if tree.size >= 2
    ]
    for place in places:
        for ranks in (2, 3):
            for parts in _parts(place, ranks, factors):
                yield Split(ranks, (place,), parts)
    for i, a in enumerate(places):
        for b in places[i + 1 :]:
            if a[0] != b[0] and _atoms(a, factors) & _atoms(b, factors):
                for ranks in (2, 3):
                    if _size(a, factors) >= ranks and _size(b, factors) >= ranks:
                        yield Split(ranks, (a, b))


def _parts(place: Place, ranks: int, factors: GraphFactors) -> Iterator[tuple[int, ...] | None]:
    """Default parts, and others by hand: the default from behind where it is uneven, else 1 + ...
    and the rest; only where the dimension is one atom can they be asked for."""
    size = _size(place, factors)
    if size < ranks:
        return
    yield None
    default = nested_parts(size, (ranks,))
    uneven = default[::-1] if len(set(default)) > 1 else (*[1] * (ranks - 1), size - ranks + 1)
    if size > ranks and isinstance(factors.tensors[place[0]].dims[place[1]], Factor):
        yield uneven


def _size(place: Place, factors: GraphFactors) -> int:
    return factors.tensors[place[0]].dims[place[1]].size


def _atoms(place: Place, factors: GraphFactors) -> set[int]:
    tensor = factors.tensors[place[0]]
    return {
        leaf.atom
        for leaf, dim in zip(tensor.leaves, tensor.dim_of_leaf, strict=True)
        if dim == place[1]
    }
