"""Replaces MindSpore's NeighborExchange and NeighborExchangeV2 in a manual program (a model for one
rank) by collective permutes.

One program serves all ranks, so lists of ranks become tables with a row for each member of the
group. Each permute sends the tensors that members send in one direction; the gradients are the
gradients of the permutes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np
import onnx
from onnx import NodeProto, TypeProto

from onnxpar.base.errors import StrategyError
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.patterns import Match, Op, attributes, rewrite

_PLACES = ((0, 1), (0, 2), (1, 2), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0))
"""The eight directions, clockwise from the top: row and column in a grid of three by three."""
_NAMES = ("top", "bottom", "left", "right")
_SIDES = (0, None, 1), (2, None, 3)
"""The index of a side in a list of widths, by row and by column of the grid."""
_END = np.iinfo(np.int64).max
_EXCHANGE = Op(("NeighborExchange", "NeighborExchangeV2"), domain=DOMAIN, before=None, after=None)
"""With MindSpore's attributes: a NeighborExchange with `before` and `after` is the plugin's own."""

Table = list[list[int]]
"""A row for each member of the group: the members with which it exchanges (-1: none), or widths."""


class _Exchange:
    """Adds the nodes that replace one exchange node.

    at       the matched node, to which new nodes are added
    members  the number of ranks in the node's group
    longest  the most rows and columns that a member sends, for a later check
    """

    def __init__(self, at: Match, members: int) -> None:
        self.at, self.node = at, at.node
        self.members = members
        self.name = at.node.name or next(iter(at.node.output), "")
        self.attrs = attributes(at.node)
        self.group = {k: self.attrs[k] for k in ("axes", "group") if k in self.attrs}
        self.longest: dict[str, int] = {}

    def table(self, key: str, width: int) -> Table:
        """Returns the attribute `key` as a table with `width` entries for each member: indices into
        the group, or -1. Errors: StrategyError for another number of entries, or for no such
        member."""
        entries = [int(n) for n in self.attrs.get(key, [])]
        if len(entries) != self.members * width:
            self.fail(
                f"{key} has {len(entries)} entries; give {self.members} x {width}: for each member "
                f"of the group, {width} other members, or -1 for none"
            )
        odd = next((n for n in entries if not -1 <= n < self.members), None)
        if odd is not None:
            self.fail(f"{key} has {odd}, but a group has members 0 to {self.members - 1}")
        return [entries[i * width : (i + 1) * width] for i in range(self.members)]

    def permute(self, x: str, sources: Sequence[int]) -> str:
        """Adds a collective permute of the tensor `x`; `sources` has for each member the member
        whose `x` it gets, or -1 for zeros. Returns the name of the result."""
        sources = list(sources)
        return self.at.add("CollectivePermute", [x], domain=DOMAIN, sources=sources, **self.group)

    def check_extents(self, types: Mapping[str, TypeProto]) -> None:
        """Checks, once types are known, that X has as many rows and columns as the exchange takes
        from it: a Slice of too few rows gives no error. Errors: StrategyError."""
        x = self.node.input[0]
        dims = types[x].tensor_type.shape.dim if x in types else []
        for (what, longest), dim in zip(self.longest.items(), dims[2:], strict=False):
            if dim.HasField("dim_value") and longest > dim.dim_value:
                self.fail(
                    f"recv_lens has {longest} at a side, but its input '{x}' has {dim.dim_value} "
                    f"{what}; give at most as many"
                )

    def fail(self, reason: str) -> NoReturn:
        raise StrategyError(f"{self.node.op_type} '{self.name}': {reason}")


class _Lists(_Exchange):
    """Replaces a NeighborExchange: each member sends input i to the i-th member of its list
    `send_rank_ids`, and receives output j from the j-th member of its list `recv_rank_ids`. The
    k-th tensor that member A sends to member B is the k-th tensor that B receives from A."""

    def build(self) -> None:
        """Adds a permute for each pair of an input and an output between which members send.
        Errors: StrategyError if members' lists disagree."""
        inputs, outputs = list(self.node.input), list(self.node.output)
        sends = self.table("send_rank_ids", len(inputs))
        receives = self.table("recv_rank_ids", len(outputs))
        sources: dict[tuple[int, int], list[int]] = {}
        for sender in range(self.members):
            for receiver in range(self.members):
                sent = [i for i, to in enumerate(sends[sender]) if to == receiver]
                received = [j for j, of in enumerate(receives[receiver]) if of == sender]
                if len(sent) != len(received):
                    self.fail(
                        f"member {sender} sends {len(sent)} tensors to member {receiver}, which "
                        f"receives {len(received)} from it"
                    )
                for pair in zip(sent, received, strict=True):
                    sources.setdefault(pair, [-1] * self.members)[receiver] = sender
        parts: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for (i, j), of in sorted(sources.items()):
            parts[j].append((i, of))
        for j, y in enumerate(outputs):
            if not parts[j]:
                self.fail(f"no member receives output {j}, '{y}'; leave it out")
            self._sum([(inputs[i], of) for i, of in parts[j]])
            self.at.nodes[-1].output[0] = y

    def _sum(self, parts: Sequence[tuple[str, list[int]]]) -> None:
        """Adds up permutes of tensors, each with its sources. A member receives from at most one of
        them, and zeros from the others, so the sum is the tensor that it receives."""
        total = ""
        for x, sources in parts:
            received = self.permute(x, sources)
            total = self.at.add("Add", [total, received]) if total else received


class _Grid(_Exchange):
    """Replaces a NeighborExchangeV2: the eight neighbors of a member in a grid give it a frame of
    rows and columns around its X, with zeros where it has no neighbor. If widths differ between
    members, all members exchange the largest widths, and cut their frames afterwards."""

    def build(self) -> None:
        """Adds a slice and a permute for each of the eight directions, and joins the results around
        X. Errors: StrategyError if members' lists disagree."""
        if self.attrs.get("data_format", b"NCHW") not in (b"NCHW", "NCHW"):
            self.fail(f"data_format={self.attrs['data_format'].decode()}: only NCHW is supported")
        sends, receives = (self.table(f"{key}_rank_ids", 8) for key in ("send", "recv"))
        give, take = (self._widths(f"{key}_lens") for key in ("send", "recv"))
        self._check(sends, receives, give, take)
        north, south, west, east = (max(each) for each in zip(*take, strict=True))
        self.longest = {"rows": max(north, south), "columns": max(west, east)}
        sizes = (north, None, south), (west, None, east)
        x = self.node.input[0]
        grid: list[list[str]] = [[""] * 3 for _ in range(3)]
        grid[1][1] = x
        for direction, (row, column) in enumerate(_PLACES):
            size = sizes[0][row], sizes[1][column]
            if 0 not in size:
                sources = [of[direction] for of in receives]
                region = self._slice(x, row, column, *size)
                grid[row][column] = self.permute(region, sources)
        rows = [self._concat([p for p in pieces if p], 3) for pieces in grid if any(pieces)]
        whole = self._concat(rows, 2)
        frame = [north, south, west, east]
        if any(widths != frame for widths in take):
            whole = self._cut(whole, take, frame)
        self.at.add("Identity", [whole])

    def _widths(self, key: str) -> Table:
        """Returns the four widths [top, bottom, left, right] of each member, from one list for all
        members or a row for each member. Errors: StrategyError."""
        widths = [int(n) for n in self.attrs.get(key, [])]
        if len(widths) == 4:
            widths = widths * self.members
        if len(widths) != 4 * self.members or min(widths) < 0:
            self.fail(
                f"{key}={widths}: give [top, bottom, left, right], each at least 0, for all "
                f"members, or such a list for each of the {self.members} members"
            )
        return [widths[4 * i : 4 * i + 4] for i in range(self.members)]

    def _check(self, sends: Table, receives: Table, give: Table, take: Table) -> None:
        """Checks that each member that receives from another member gets the width that this member
        sends. Errors: StrategyError.

        sends, receives  for each member, the member in each of the eight directions, or -1
        give, take       for each member, the four widths that it sends and receives
        """
        self._check_answers(receives, sends, "receives from", "sends to")
        self._check_answers(sends, receives, "sends to", "receives from")
        for member in range(self.members):
            for direction, other in enumerate(receives[member]):
                if other >= 0:
                    self._check_widths(member, direction, other, take[member], give[other])

    def _check_answers(self, table: Table, opposite: Table, does: str, answers: str) -> None:
        """Checks that if member A names member B in `table`, B names A in `opposite` in the
        opposite direction. `does` and `answers` are verbs for the error."""
        for member, row in enumerate(table):
            for direction, other in enumerate(row):
                back = (direction + 4) % 8
                if other >= 0 and opposite[other][back] != member:
                    self.fail(
                        f"member {member} {does} member {other} in direction {direction}, but "
                        f"that one {answers} {opposite[other][back]} in direction {back}"
                    )

    def _check_widths(
        self, member: int, direction: int, other: int, take: list[int], give: list[int]
    ) -> None:
        """Checks that a member receives from its neighbor `other` the widths that the neighbor
        sends. Errors: StrategyError."""
        row, column = _PLACES[direction]
        sides = [side for side in (_SIDES[0][row], _SIDES[1][column]) if side is not None]
        for side in sides:
            if take[side] != give[side ^ 1]:
                self.fail(
                    f"member {member} receives {take[side]} at its {_NAMES[side]} from member "
                    f"{other}, which sends {give[side ^ 1]} of its {_NAMES[side ^ 1]}"
                )

    def _slice(self, x: str, row: int, column: int, height: int | None, width: int | None) -> str:
        """Adds a slice of X: the part that the neighbor in this direction sends (the last rows of a
        neighbor above, the first rows of a neighbor below). Returns the name of the result."""
        starts, ends, axes = [], [], []
        for axis, place, size in ((2, row, height), (3, column, width)):
            if size is not None:
                starts.append(-size if place == 0 else 0)
                ends.append(_END if place == 0 else size)
                axes.append(axis)
        return self.at.add("Slice", [x, starts, ends, axes])

    def _concat(self, pieces: Sequence[str], axis: int) -> str:
        """Joins tensors along an axis. Returns the name of the result."""
        if len(pieces) == 1:
            return pieces[0]
        return self.at.add("Concat", pieces, axis=axis)

    def _cut(self, whole: str, take: Table, frame: list[int]) -> str:
        """Cuts the result of each member to the member's own widths, from the largest widths
        `frame`. Returns the name of the result."""
        starts = [[frame[0] - own[0], frame[2] - own[2]] for own in take]
        ends = [[own[side] - frame[side] or _END for side in (1, 3)] for own in take]
        rank = self.at.add("Rank", [], domain=DOMAIN, **self.group)
        bounds = [self.at.add("Gather", [rows, rank], axis=0) for rows in (starts, ends)]
        return self.at.add("Slice", [whole, *bounds, [2, 3]])


def expand_exchanges(
    model: onnx.ModelProto, members: Callable[[NodeProto], int]
) -> list[_Exchange]:
    """Replaces the exchange nodes of a manual program by collective permutes, in place. Returns the
    exchanges, so that the caller can check their sizes once types are known. `members` is a
    function from a node to the number of ranks in its largest group.

    Errors: StrategyError, naming the node, for lists that do not fit together.
    """
    exchanges: list[_Exchange] = []

    def expand(at: Match) -> bool:
        if at.scope.outer is not None:
            return False  # it is refused later, by its own name
        kind = _Grid if at.node.op_type == "NeighborExchangeV2" else _Lists
        exchange = kind(at, members(at.node))
        exchanges.append(exchange)
        exchange.build()
        return True

    rewrite(model.graph, {_EXCHANGE: expand})
    return exchanges
