"""Proves that ranks cannot wait for each other in a circle: tokens put the collectives of each rank
into one order, and the orders of all ranks together have no circle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from onnxpar.equivalence.program import Node, Program, captured
from onnxpar.equivalence.ranks import PLUGIN, communicates, tokens_of

_WITHOUT_TAG = frozenset(["Complete", "Gate", "After", "Rank", "GroupSize", "FusedElementwise"])


class Disorder(Exception):
    """Ranks may wait for each other, or for a rank that does not take part; the text says which."""


def check_order(programs: Sequence[Program]) -> int:
    """Returns the number of collectives. Errors: Disorder."""
    chains = [
        list(_chain(program.nodes, tokens_of(program.nodes), rank))
        for rank, program in enumerate(programs)
    ]
    members: dict[int, dict[int, Node]] = defaultdict(dict)
    for rank, chain in enumerate(chains):
        for node in chain:
            tag = int(node.attrs["tag"])
            if rank in members[tag]:
                names = f"{members[tag][rank].name!r} and {node.name!r}"
                raise Disorder(f"rank {rank} has two collectives with the tag {tag}: {names}")
            members[tag][rank] = node
    for tag, nodes in members.items():
        _check_members(tag, nodes, len(programs))
    before: dict[int, set[int]] = {tag: set() for tag in members}
    for chain in chains:
        tags = [int(node.attrs["tag"]) for node in chain]
        for earlier, later in pairwise(tags):
            before[later].add(earlier)
    try:
        list(TopologicalSorter(before).static_order())
    except CycleError as error:
        names = " before ".join(next(iter(members[tag].values())).name for tag in error.args[1])
        raise Disorder(f"ranks wait for each other in a circle: {names}") from None
    return len(members)


def _check_members(tag: int, nodes: dict[int, Node], ranks: int) -> None:
    """The ranks of a collective must be its group, and have the same op and stream."""
    first_rank, first = next(iter(nodes.items()))
    for rank, node in nodes.items():
        if "group" in node.attrs and rank not in node.attrs["group"]:
            raise Disorder(f"rank {rank} is not in the group of its own {node.name!r}")
        if node.op != first.op and {node.op, first.op} != {"Send", "Recv"}:
            raise Disorder(
                f"tag {tag} is {first.op} {first.name!r} on rank {first_rank}, and {node.op} on "
                f"rank {rank}"
            )
        if node.attrs.get("stream", 0) != first.attrs.get("stream", 0):
            raise Disorder(f"{node.name!r} runs in other streams on ranks {first_rank} and {rank}")
    if first.op in ("Send", "Recv"):
        return
    groups = {rank: _group(node, ranks) for rank, node in nodes.items()}
    for own, rank in {own: rank for rank, own in groups.items()}.items():
        for member in own:
            if member not in nodes:
                raise Disorder(
                    f"rank {rank} waits in {first.name!r} for rank {member}, which lacks it"
                )
            if groups[member] != own:
                raise Disorder(f"ranks {rank} and {member} have other groups for {first.name!r}")


def _group(node: Node, ranks: int) -> tuple[int, ...]:
    """The members of a collective, in order."""
    return tuple(map(int, node.attrs.get("group", range(ranks))))


def _chain(nodes: Sequence[Node], tokens: Collection[str], rank: int) -> Iterator[Node]:
    """Yields the collectives of a rank in the order of their tokens; in the place of an If, a Loop
    or a Scan those inside, as if all branches ran."""
    sent = [n for n in nodes if communicates(n)]
    makers = {name: n for n in sent for name in n.outputs if n.domain == PLUGIN or name in tokens}
    own = [n for n in sent if n.domain != PLUGIN or n.op not in _WITHOUT_TAG]
    after: dict[int, list[Node]] = defaultdict(list)
    counted = 0
    for node in own:
        if node.domain == PLUGIN and "tag" not in node.attrs:
            raise Disorder(f"{node.op} {node.name!r} of rank {rank} has no tag")
        earlier = _earlier(node, makers, tokens)
        after[id(earlier) if earlier is not None else 0].append(node)
    at: int = 0
    while at in after:
        following = after[at]
        if len(following) > 1:
            raise Disorder(
                f"no token orders {following[0].name!r} and {following[1].name!r} of rank {rank}"
            )
        if following[0].domain == PLUGIN:
            yield following[0]
        for body in following[0].bodies.values():
            yield from _chain(body.nodes, tokens_of(body.nodes, {*tokens, *body.inputs}), rank)
        counted += 1
        at = id(following[0])
    if counted < len(own):
        raise Disorder(f"the tokens of rank {rank} are not one chain")


def _earlier(node: Node, makers: Mapping[str, Node], tokens: Collection[str]) -> Node | None:
    """The collective before this one, through completions and other nodes that pass a token on."""
    seen: set[int] = set()
    todo = [makers[name] for name in _ordering(node, tokens) if name in makers]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if each.domain != PLUGIN or each.op not in _WITHOUT_TAG:
            return each
        todo += [makers[name] for name in _ordering(each, tokens) if name in makers]
    return None


def _ordering(node: Node, tokens: Collection[str]) -> Sequence[str]:
    """What orders a node behind others: a collective's operands behind the first, the tokens that
    other nodes read."""
    if node.domain == PLUGIN:
        return node.inputs[1:]
    return [n for n in (*node.inputs, *sorted(captured(node.proto))) if n in tokens]
