"""How many rows each expert of a mixture computed, from the events of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.layout.layout import Layout, indices, leaves
from onnxpar.layout.mesh import Mesh
from onnxpar.runtime.trace import Event, ExpertLoad


@dataclass(frozen=True)
class _Place:
    """The numbers of a rank's experts, and whether its rows count: ranks that compute the same rows
    of the same experts are counted once."""

    experts: Array
    counts: bool


def expert_loads(
    mixtures: Sequence[Mapping[str, Any]], mesh: Mesh, events: Sequence[Sequence[Event]]
) -> Iterator[ExpertLoad]:
    """Yields the load of each mixture of a plan that ran; `events` are those of each rank."""
    found: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for rank, own in enumerate(events):
        for event in own:
            if event.rows is not None:
                found[event.name, rank, event.run].append(event.rows)
    for entry in mixtures:
        places = _places(Layout.from_json(entry["layout"]), mesh)
        tokens: Array = np.zeros(entry["experts"], np.int64)
        runs = set()
        for (name, rank, run), rows in found.items():
            place = places[rank]
            count = len(place.experts)
            if name == entry["node"] and place.counts and len(rows) % count == 0:
                tokens[place.experts] += np.reshape(rows, (-1, count)).sum(0)
                runs.add(run)
        if runs:
            yield ExpertLoad(entry["name"], tuple(tokens.tolist()), len(runs))


def _places(layout: Layout, mesh: Mesh) -> list[_Place]:
    """The place of each rank; `layout` is that of [expert, row, column]."""
    seen: set[tuple[object, ...]] = set()
    places = []
    split = [leaf for dim in layout.dims[:2] for leaf in leaves(dim)]
    for rank in range(mesh.size):
        key = tuple(leaf.part(mesh, rank) for leaf in split)
        places.append(_Place(indices(layout.dims[0], mesh, rank), key not in seen))
        seen.add(key)
    return places
