"""How many rows each expert of a mixture of experts computed, from the recorded events of all
ranks."""

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
    """A rank's part of a mixture.

    experts  the numbers of its experts
    counts   False if another rank computes the same rows of the same experts, and is counted
    """

    experts: Array
    counts: bool


def expert_loads(
    mixtures: Sequence[Mapping[str, Any]], mesh: Mesh, events: Sequence[Sequence[Event]]
) -> Iterator[ExpertLoad]:
    """Yields the load of each mixture that ran: the rows that each of its experts computed.

    mixtures  the entries of mixtures in plan.json
    events    the recorded events of each rank
    """
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
    """Returns the part of each rank. `layout` is the layout of the tensor [expert, row, column] on
    which the experts compute."""
    seen: set[tuple[object, ...]] = set()
    places = []
    split = [leaf for dim in layout.dims[:2] for leaf in leaves(dim)]
    for rank in range(mesh.size):
        key = tuple(leaf.part(mesh, rank) for leaf in split)
        places.append(_Place(indices(layout.dims[0], mesh, rank), key not in seen))
        seen.add(key)
    return places
