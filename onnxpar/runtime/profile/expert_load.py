"""How many rows each expert of a mixture computed, from the events of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
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
    """Yields the load of each mixture of a plan that ran; `events` are the events of each rank."""
    recorded: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for rank, own in enumerate(events):
        for event in own:
            if event.rows is not None:
                recorded[event.name, rank, event.run].append(event.rows)
    for entry in mixtures:
        places = _places(Layout.from_json(entry["layout"]), mesh)
        tokens: Array = np.zeros(entry["experts"], np.int64)
        runs = set()
        for (name, rank, run), rows in recorded.items():
            place, (node, step) = places[rank], finder_of(name, [entry["node"]])
            if node is None or not place.counts:
                continue
            of = place.experts if step is None else place.experts[[step]]
            if len(rows) % len(of) == 0:
                tokens[of] += np.reshape(rows, (-1, len(of))).sum(0)
                runs.add(run)
        if runs:
            yield ExpertLoad(entry["name"], tuple(tokens.tolist()), len(runs))


def finder_of(name: str, finders: Collection[str]) -> tuple[str | None, int | None]:
    """Returns the node among `finders` (nodes in a Scan over experts) that an event belongs to, or
    None; and the number of the expert, if the rank has the node once for each of its experts."""
    if name in finders:
        return name, None
    node, _, step = name.rpartition("@")
    return (node, int(step)) if node in finders and step.isdigit() else (None, None)


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
