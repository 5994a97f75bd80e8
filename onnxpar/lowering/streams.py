"""Puts collectives of different groups of ranks into different streams, which run at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN, KINDS, START, kind_of
from onnxpar.graph.per_rank import PerRank
from onnxpar.graph.subgraphs import all_nodes, bodies

MOST = 4
"""The most streams of a rank: each has connections to all ranks, and a thread."""
STREAM = "stream"
"""The attribute of a collective for the number of its stream; 0 unless given."""


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of all ranks in a collective, each once. Equal groups are one object, since
    comparing those of thousands of ranks takes long."""

    each: tuple[tuple[int, ...], ...]


GroupsOf = Callable[[gs.Node], Groups]


def groups_of(per_rank: PerRank, ranks: int) -> GroupsOf:
    """Returns a function that gives the groups of a collective; none for a message between two
    ranks."""
    known: dict[Hashable, Groups] = {}
    distinct: dict[tuple[tuple[int, ...], ...], Groups] = {}

    def find(node: gs.Node) -> Groups:
        own = tuple(node.attrs.get("group", ()))
        by_rank = per_rank.attributes.get((node.name, "group"))
        key = by_rank or own
        if key not in known:
            each = tuple(_distinct(by_rank, ranks)) if by_rank else (own,)
            known[key] = distinct.setdefault(each, Groups(each))
        return known[key]

    return find


def _distinct(group: Callable[[int], Sequence[int]], ranks: int) -> Iterator[tuple[int, ...]]:
    seen: set[int] = set()
    for rank in range(ranks):
        if rank not in seen:
            own = tuple(group(rank))
            seen.update(own)  # members agree on their group
            yield own


def collectives_in(node: gs.Node) -> list[gs.Node]:
    """The node, if it communicates, and the collectives in its bodies."""
    inner = (each for body in bodies(node) for each in all_nodes(body))
    return [n for n in (node, *inner) if n.domain == DOMAIN and kind_of(n.op) in KINDS]


def assign_streams(graph: gs.Graph, groups: GroupsOf) -> int:
    """Gives the groups of each started collective a stream of their own, as far as there are
    enough; all other collectives share stream 0. Returns the number of streams.

    The number is the same on all ranks, as they share the graph: members must agree on it."""
    found = [each for node in graph.nodes for each in collectives_in(node)]
    started = dict.fromkeys(groups(node) for node in found if node.op.startswith(START))
    shared = any(groups(node) not in started for node in found)
    own = MOST - shared
    number = {of: shared + i % own for i, of in enumerate(started)}
    for node in found:
        stream = number.get(groups(node), 0)
        if stream:
            node.attrs[STREAM] = stream
    return max(number.values(), default=0) + 1
