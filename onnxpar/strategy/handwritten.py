"""Checks and completes the handwritten collectives of a manual program (a model that its author
wrote for one rank): their groups, tags, peers and order.

In the model, the attribute `axes` of a collective names mesh axes, as text, or `group` lists ranks
or names a group of the strategy; without both, the collective runs over all ranks. `peer` of Send
and Recv is a list with the peer of each rank, or -1 for a rank that takes no part. An AllToAll
along one axis moves the bounds between parts; its `split_sizes` is a table with a row for each
member: the sizes that the member sends to each other member. Tags and tokens may be left out, as
all collectives run in graph order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NoReturn

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.collectives import DOMAIN, KINDS, RANK_CONSTANTS
from onnxpar.graph.per_rank import PerRank
from onnxpar.graph.subgraphs import subgraphs
from onnxpar.graph.tensors import tensor_shape
from onnxpar.strategy.collective_shapes import OPS
from onnxpar.strategy.manual import Manual
from onnxpar.strategy.rank_groups import GroupOf


@dataclass(frozen=True)
class Event:
    """One collective in the sequence of collectives that a rank runs.

    what     names the collective in errors
    key      equal for the events in which ranks meet in one collective
    members  the ranks that take part
    side     "Send" or "Recv" of a message; "" for other collectives
    """

    what: str
    key: tuple[object, ...]
    members: tuple[int, ...]
    side: str = ""


class Handwritten:
    """Completes handwritten collectives, node by node in graph order; attributes that differ by
    rank go into `per_rank`. `events[rank]` has the collectives that a rank runs, in order."""

    def __init__(self, graph: gs.Graph, manual: Manual, per_rank: PerRank) -> None:
        self.mesh = manual.mesh
        self.manual = manual
        self.per_rank = per_rank
        self._groups: dict[str, GroupOf] = {}
        self.events: list[list[Event]] = [[] for _ in range(self.mesh.size)]
        self._outputs = {id(t) for t in graph.outputs}
        nodes = [n for n in graph.nodes if n.domain == DOMAIN]
        self._refuse_inner(graph)
        self._taken = {n.attrs["tag"] for n in nodes if "tag" in n.attrs}
        self._unique: set[int] = set()
        self._messages: dict[tuple[int, int, int], int] = {}
        self._count: Counter[tuple[str, tuple[int, int]]] = Counter()

    def settle(self, node: gs.Node) -> None:
        """Gives a collective the attributes that the runtime needs, and adds it to `events`.
        Errors: StrategyError that names the collective."""
        if node.op not in OPS:
            self._fail(node, f"no such collective; use one of {', '.join(OPS)}")
        if node.op in RANK_CONSTANTS:
            self._group(node)
            return
        self._strip_token(node)
        if KINDS[node.op].awaits is None:
            self._message(node)
        else:
            self._group(node)
            self._tag(node)
            if node.op == "AllToAll" and node.attrs["split_axis"] == node.attrs["concat_axis"]:
                self._table(node)
            if node.op == "CollectivePermute":
                self._permute(node)
            self._lists(node)
            for rank in range(self.mesh.size):
                members = self.members(node, rank)
                key = (node.name, members)
                self.events[rank].append(Event(f"{node.op} '{node.name}'", key, members))

    def _refuse_inner(self, graph: gs.Graph) -> None:
        """Refuses collectives in bodies of If, Loop and Scan, because ranks could take different
        paths through bodies. Errors: StrategyError."""
        for outer in graph.nodes:
            for inner in subgraphs(outer):
                self._refuse_inner(inner)
                for node in inner.nodes:
                    if node.domain == DOMAIN and node.op not in RANK_CONSTANTS:
                        self._fail(
                            node,
                            f"is in a body of {outer.op} '{outer.name}', which some ranks may run "
                            "and others not; move it out",
                        )

    def _strip_token(self, node: gs.Node) -> None:
        """Removes the tokens (tensors that only order collectives) of a collective: ranks run
        collectives in graph order. Errors: StrategyError if other nodes read or write its
        tokens."""
        results = 0 if node.op == "Send" else 1
        if not 1 <= len(node.inputs) <= 2 or not results <= len(node.outputs) <= results + 1:
            self._fail(
                node,
                "must have one input X and one output Y (Send has no output), each followed by at "
                "most one token",
            )
        for token in node.inputs[1:]:
            producer = token.inputs[0] if token.inputs else None
            if producer is not None and producer.domain != DOMAIN and producer.op != "Constant":
                self._fail(
                    node,
                    f"its token '{token.name}' comes from {producer.op} '{producer.name}'; only "
                    "collectives produce tokens",
                )
        for token in node.outputs[results:]:
            readers = [n for n in token.outputs if n.domain != DOMAIN or n.inputs[0] is token]
            if readers or id(token) in self._outputs:
                self._fail(
                    node,
                    f"its token '{token.name}' is an output of the graph or an input of a node "
                    "that is not a collective; only collectives may read tokens",
                )
        while len(node.inputs) > 1:
            node.inputs.pop()
        while len(node.outputs) > results:
            node.outputs.pop()

    def _group(self, node: gs.Node) -> None:
        """Sets the attribute `group` for each rank from the node's mesh axes, list of ranks, or
        group name."""
        of = self._groups[node.name] = self.manual.group_of(f"{node.op} '{node.name}'", node.attrs)
        is_given = "axes" in node.attrs or bool(node.attrs.get("group"))
        node.attrs.pop("axes", None)
        if is_given:
            node.attrs["group"] = list(of(0))
            if len(of(0)) < self.mesh.size:
                self.per_rank.attributes[node.name, "group"] = lambda rank: list(of(rank))

    def members(self, node: gs.Node, rank: int) -> tuple[int, ...]:
        """Returns the ranks that run the node together with this rank, including the rank itself.
        The two ends of a message are in rising order."""
        peer = self.per_rank.attributes.get((node.name, "peer"))
        if peer is not None:
            return tuple(sorted({rank, peer(rank)} - {-1}))
        return self._groups[node.name](rank)

    def _count_members(self, node: gs.Node) -> int:
        """Returns the number of members of the node's largest group."""
        return max(len(self.members(node, rank)) for rank in range(self.mesh.size))

    def _lists(self, node: gs.Node) -> None:
        """Checks that attributes with an entry for each member fit all groups. A rank that is alone
        in its group gets attributes for a group of one. Errors: StrategyError."""
        counts = {len(self.members(node, rank)) for rank in range(self.mesh.size)}
        several = sorted(counts - {1})
        lists = [key for key in KINDS[node.op].by_member if node.attrs.get(key)]
        if lists and len(several) > 1:
            self._fail(
                node,
                f"{lists[0]} has an entry for each member, but the groups have {several[0]} and "
                f"{several[-1]} members; give groups of one size, or leave {lists[0]} out",
            )
        count = max(counts)
        for key in lists:
            entries = node.attrs[key]
            if key != KINDS[node.op].shapes and len(entries) != count:
                self._fail(
                    node,
                    f"{key}={list(entries)} must have an entry for each of the {count} members of "
                    "a group",
                )
        for key in (*lists, "root"):
            if 1 in counts and several and key in node.attrs:
                self._give_alone(node, key)

    def _give_alone(self, node: gs.Node, key: str) -> None:
        """Changes an attribute on ranks that are alone in their group, so that it fits a group of
        one."""
        value = node.attrs[key]
        of_rank = self.per_rank.attributes.get((node.name, key))
        alone = {"root": 0, "sources": [0]}.get(key)

        def on(rank: int) -> Any:
            if len(self.members(node, rank)) == 1:
                return alone
            return of_rank(rank) if of_rank else value

        self.per_rank.attributes[node.name, key] = on

    def _tag(self, node: gs.Node) -> None:
        """Gives a collective its tag if it has none. Errors: StrategyError if another collective
        has the tag."""
        tag = node.attrs.setdefault("tag", None)
        if tag is None:
            node.attrs["tag"] = tag = self._fresh()
        elif tag in self._unique:
            self._fail(node, f"another collective also has tag={tag}; leave tags out")
        self._unique.add(tag)

    def _table(self, node: gs.Node) -> None:
        """Gives each member of an AllToAll its row of the table `split_sizes` (the sizes that it
        sends) and its column (the sizes that it receives). Errors: StrategyError for a table of
        another size."""
        sizes = node.attrs.get("split_sizes") or []
        count = self._count_members(node)
        if len(sizes) != count * count or "concat_sizes" in node.attrs:
            self._fail(
                node,
                f"along one axis, split_sizes must be a table of {count} x {count} (the size that "
                "each member sends to each), and concat_sizes must be left out",
            )

        def row(rank: int) -> list[int]:
            at = self.members(node, rank).index(rank)
            return list(sizes[at * count : (at + 1) * count])

        def column(rank: int) -> list[int]:
            return list(sizes[self.members(node, rank).index(rank) :: count])

        node.attrs["split_sizes"], node.attrs["concat_sizes"] = row(0), column(0)
        self.per_rank.attributes[node.name, "split_sizes"] = row
        self.per_rank.attributes[node.name, "concat_sizes"] = column

    def _permute(self, node: gs.Node) -> None:
        """Checks the attribute `sources` of a CollectivePermute. If the shape of X is the same on
        all ranks, notes this, so that members need not tell each other their shapes. Errors:
        StrategyError."""
        sources = node.attrs.get("sources")
        count = self._count_members(node)
        members = sources if isinstance(sources, list) else []
        named = [s for s in members if s != -1]
        if len(members) != count or len({*named} & {*range(count)}) != len(named):
            self._fail(
                node,
                f"sources={sources}: give a list with the member of the group whose X each of the "
                f"{count} members gets, each at most once, and -1 for a member that gets zeros",
            )
        shape = tensor_shape(node.inputs[0])
        if shape and "shapes" not in node.attrs:
            node.attrs["shapes"] = [-1] * len(shape)

    def _fresh(self) -> int:
        """Returns a tag that no collective has."""
        tag = next(i for i in range(1, len(self._taken) + 2) if i not in self._taken)
        self._taken.add(tag)
        return tag

    def _message(self, node: gs.Node) -> None:
        """Sets the peer and the tag of a Send or Recv on each rank: the k-th Send from one rank
        to another has the tag of the k-th Recv there. Errors: StrategyError for a wrong list of
        peers."""
        peers = node.attrs.get("peer")
        size = self.mesh.size
        is_list = isinstance(peers, list) and len(peers) == size
        if not is_list or any(not -1 <= p < size or p == r for r, p in enumerate(peers)):
            self._fail(
                node,
                f"peer={peers}: give a list with the peer of each of the {size} ranks, and -1 for "
                "a rank that takes no part",
            )
        tags = [self._message_tag(node, rank, peer) for rank, peer in enumerate(peers)]
        for rank, (peer, tag) in enumerate(zip(peers, tags, strict=True)):
            if peer >= 0:
                ends = (rank, peer) if node.op == "Send" else (peer, rank)
                what = f"{node.op} '{node.name}'"
                event = Event(what, ("message", *ends, tag), (rank, peer), node.op)
                self.events[rank].append(event)
        node.attrs["peer"], node.attrs["tag"] = peers[0], tags[0]
        self.per_rank.attributes[node.name, "peer"] = lambda rank: peers[rank]
        self.per_rank.attributes[node.name, "tag"] = lambda rank: tags[rank]

    def _message_tag(self, node: gs.Node, rank: int, peer: int) -> int:
        """Returns the tag of a message between two ranks; 0 for a rank without a peer."""
        if "tag" in node.attrs:
            return int(node.attrs["tag"])
        if peer < 0:
            return 0
        ends = (rank, peer) if node.op == "Send" else (peer, rank)
        nth = self._count[node.op, ends]
        self._count[node.op, ends] += 1
        key = (*ends, nth)
        if key not in self._messages:
            self._messages[key] = self._fresh()
        return self._messages[key]

    def _fail(self, node: gs.Node, reason: str) -> NoReturn:
        raise StrategyError(f"{node.op} '{node.name}': {reason}")


def check_order(events: list[list[Event]], size: int) -> None:
    """Checks that the collectives of all ranks run to the end. `events` has the sequence of each of
    `size` ranks. Errors: StrategyError if ranks would wait for each other forever; it names two of
    them."""
    at = [0] * size
    heads = set(range(size))
    while heads:
        rank = heads.pop()
        if at[rank] == len(events[rank]):
            continue
        event = events[rank][at[rank]]
        peers = [m for m in event.members if m != rank]
        now = [events[m][at[m]] if at[m] < len(events[m]) else None for m in peers]
        if all(_meet(event, other) for other in now):
            for member in event.members:
                at[member] += 1
                heads.add(member)
    for rank in range(size):
        if at[rank] < len(events[rank]):
            event = events[rank][at[rank]]
            now = [e[i] if i < len(e) else None for e, i in zip(events, at, strict=True)]
            other = next(m for m in event.members if m != rank and not _meet(event, now[m]))
            _report_wait(event, rank, now[other], other)


def _meet(event: Event, other: Event | None) -> bool:
    """True if two ranks at these events are in the same collective: they can go on."""
    return (
        other is not None
        and event.key == other.key
        and (not event.side or event.side != other.side)
    )


def _report_wait(event: Event, rank: int, met: Event | None, other: int) -> NoReturn:
    """Raises StrategyError: `rank` waits in `event` for the rank `other`, which is at the event
    `met`, or has ended (None)."""
    state = f"waits in {met.what}" if met else "has ended"
    raise StrategyError(
        f"deadlock: {event.what} of rank {rank} waits for rank {other}, which {state}; a Send ends "
        "when its Recv runs, so each pair of ranks must run their collectives in the same order"
    )
