"""How many rows each expert of a mixture computed, from the events of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.layout.layout import Layout, indices, leaves
from onnxpar.layout.mesh import Mesh
from onnxpar.runtime.profile.trace import Event, ExpertLoad


@dataclass(frozen=True)
class _Place:
    """The numbers of a rank's experts, and whether its rows count: ranks that compute the same rows
    of the same experts are counted once."""

    experts: Array
    counts: bool


def expert_loads(
    mixtures: Sequence[Mapping[str, Any]], mesh: Mesh, events: Sequence[Sequence[Event]]
) -> Iterator[ExpertLoad]:
    """Yields the load of each mixture of a plan that ran; `mixtures` are those of the plan,
    `events` those of each rank."""
    for entry in mixtures:
        places = _places(Layout.from_json(entry["layout"]), mesh)
        tokens: Array = np.zeros(entry["experts"], np.int64)
        runs = set()
        for place, own in zip(places, events, strict=True):
            for event in own if place.counts else ():
                if event.name == entry["node"] and event.rows is not None:
                    tokens[place.experts] += event.rows[: len(place.experts)]
                    runs.add(event.run)
        if runs:
            yield ExpertLoad(entry["name"], tuple(tokens.tolist()), len(runs))


def _places(layout: Layout, mesh: Mesh) -> list[_Place]:
    """The place of each rank; `layout` is the layout of the tensor [expert, row, column]."""
    seen: set[tuple[object, ...]] = set()
    places = []
    split = [leaf for dim in layout.dims[:2] for leaf in leaves(dim)]
    for rank in range(mesh.size):
        key = tuple(leaf.part(mesh, rank) for leaf in split)
        places.append(_Place(indices(layout.dims[0], mesh, rank), key not in seen))
        seen.add(key)
    return places
