"""Assigns collectives of different groups of ranks to different streams, which communicate at the
same time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN, KINDS, START, kind_of
from onnxpar.graph.per_rank import PerRank
from onnxpar.graph.subgraphs import all_nodes, bodies

MOST = 4
"""The most streams of a rank: each stream has connections to all ranks, and a thread."""
STREAM = "stream"
"""The attribute of a collective that has the number of its stream; 0 by default."""


@dataclass(frozen=True, eq=False)
class Groups:
    """The distinct groups of ranks that run a collective: ((0, 1), (2, 3)) for an all-reduce in
    pairs. Equal groups are one object, because comparing the groups of thousands of ranks is
    slow."""

    each: tuple[tuple[int, ...], ...]


GroupsOf = Callable[[gs.Node], Groups]


def groups_of(per_rank: PerRank, ranks: int) -> GroupsOf:
    """Returns a function from a collective to its groups. `ranks` is the number of all ranks; a
    message between two ranks has no groups."""
    cache: dict[Hashable, Groups] = {}
    distinct: dict[tuple[tuple[int, ...], ...], Groups] = {}

    def find(node: gs.Node) -> Groups:
        group = tuple(node.attrs.get("group", ()))
        by_rank = per_rank.attributes.get((node.name, "group"))
        key = by_rank or group
        if key not in cache:
            groups = tuple(_distinct(by_rank, ranks)) if by_rank else (group,)
            cache[key] = distinct.setdefault(groups, Groups(groups))
        return cache[key]

    return find


def _distinct(group: Callable[[int], Sequence[int]], ranks: int) -> Iterator[tuple[int, ...]]:
    """Yields the distinct groups; `group` returns the group of a rank."""
    seen: set[int] = set()
    for rank in range(ranks):
        if rank not in seen:
            members = tuple(group(rank))
            seen.update(members)  # members agree on their group
            yield members


def collectives_in(node: gs.Node) -> list[gs.Node]:
    """Returns the collectives that run with a node: the node itself, if it communicates, and the
    collectives in its bodies."""
    inner = (nested for body in bodies(node) for nested in all_nodes(body))
    return [n for n in (node, *inner) if n.domain == DOMAIN and kind_of(n.op) in KINDS]


def assign_streams(graph: gs.Graph, groups: GroupsOf) -> int:
    """Assigns a stream to the groups of each started collective, in place, and returns the number
    of streams. If there are not enough streams, groups share them; all other collectives share
    stream 0.

    Members of a group must agree on its stream; they do, because all ranks share the graph.
    """
    collectives = [inner for node in graph.nodes for inner in collectives_in(node)]
    started = dict.fromkeys(groups(node) for node in collectives if node.op.startswith(START))
    shared = any(groups(node) not in started for node in collectives)
    available = MOST - shared
    number = {of: shared + i % available for i, of in enumerate(started)}
    for node in collectives:
        stream = number.get(groups(node), 0)
        if stream:
            node.attrs[STREAM] = stream
    return max(number.values(), default=0) + 1
