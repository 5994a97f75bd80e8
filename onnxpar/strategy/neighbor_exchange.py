"""MindSpore's NeighborExchange and NeighborExchangeV2 in a manual program, as collective permutes.

One program serves all ranks, so the lists of ranks become tables with a row for each member of the
group. Each permute sends what a member sends in one direction; gradients are those of the permutes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import onnx
from onnx import NodeProto, TypeProto, helper, numpy_helper

from onnxpar.base.errors import StrategyError
from onnxpar.graph.collectives import DOMAIN

_PLACES = ((0, 1), (0, 2), (1, 2), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0))
"""The eight directions, clockwise from the top: row and column in a grid of three by three."""
_NAMES = ("top", "bottom", "left", "right")
_SIDES = (0, None, 1), (2, None, 3)
"""The index of a side in a list of widths, by row and by column of that grid."""
_END = np.iinfo(np.int64).max

Table = list[list[int]]


def _is_exchange(node: NodeProto) -> bool:
    """True for a node with MindSpore's attributes; a NeighborExchange with `before` and `after` is
    the plugin's own."""
    if node.domain != DOMAIN or node.op_type not in ("NeighborExchange", "NeighborExchangeV2"):
        return False
    return not {"before", "after"} & {a.name for a in node.attribute}


class _Exchange:
    """Collects the nodes that take the place of one exchange."""

    def __init__(self, node: NodeProto, members: int) -> None:
        self.node = node
        self.members = members
        self.name = node.name or next(iter(node.output), "")
        self.attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self.group = {k: self.attrs[k] for k in ("axes", "group") if k in self.attrs}
        self.nodes: list[NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.longest: dict[str, int] = {}

    def table(self, key: str, width: int) -> Table:
        """An attribute as a table with a row for each member, of indices into the group or -1."""
        found = [int(n) for n in self.attrs.get(key, [])]
        if len(found) != self.members * width:
            self.fail(
                f"{key} has {len(found)} entries; give {self.members} x {width}: for each member "
                f"of the group, {width} other members, or -1 for none"
            )
        odd = next((n for n in found if not -1 <= n < self.members), None)
        if odd is not None:
            self.fail(f"{key} has {odd}, but a group has members 0 to {self.members - 1}")
        return [found[i * width : (i + 1) * width] for i in range(self.members)]

    def permute(self, x: str, sources: Sequence[int], y: str) -> str:
        return self.add("CollectivePermute", [x], y, DOMAIN, sources=list(sources), **self.group)

    def constant(self, value: Any) -> str:
        name = f"{self.name}::constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, np.int64), name))
        return name

    def add(self, op: str, inputs: Sequence[str], y: str, domain: str = "", **attrs: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [y], y, domain=domain, **attrs))
        return y

    def fresh(self, what: str) -> str:
        return f"{self.name}::{what}{len(self.nodes)}"

    def check_extents(self, types: Mapping[str, TypeProto]) -> None:
        """Checks that X has as many rows and columns as its slices, now that types are known: a
        Slice gives fewer without an error."""
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
    """NeighborExchange: each member sends input i to the i-th member of its list, and receives
    output j from the j-th member of its other list. The k-th tensor that one member sends to
    another is the k-th that this one receives from it."""

    def build(self) -> list[NodeProto]:
        inputs, outputs = list(self.node.input), list(self.node.output)
        sends = self.table("send_rank_ids", len(inputs))
        receives = self.table("recv_rank_ids", len(outputs))
        sources: dict[tuple[int, int], list[int]] = {}
        for sender in range(self.members):
            for receiver in range(self.members):
                given = [i for i, to in enumerate(sends[sender]) if to == receiver]
                taken = [j for j, of in enumerate(receives[receiver]) if of == sender]
                if len(given) != len(taken):
                    self.fail(
                        f"member {sender} sends {len(given)} tensors to member {receiver}, which "
                        f"receives {len(taken)} from it"
                    )
                for pair in zip(given, taken, strict=True):
                    sources.setdefault(pair, [-1] * self.members)[receiver] = sender
        parts: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for (i, j), of in sorted(sources.items()):
            parts[j].append((i, of))
        for j, y in enumerate(outputs):
            if not parts[j]:
                self.fail(f"no member receives output {j}, '{y}'; leave it out")
            self._sum(y, [(inputs[i], of) for i, of in parts[j]])
        return self.nodes

    def _sum(self, y: str, parts: Sequence[tuple[str, list[int]]]) -> None:
        """Adds up permutes, of which each member receives from at most one; the others give it
        zeros."""
        total = ""
        for n, (x, sources) in enumerate(parts):
            is_last = n + 1 == len(parts)
            got = self.permute(x, sources, y if len(parts) == 1 else self.fresh("got"))
            if total:
                got = self.add("Add", [total, got], y if is_last else self.fresh("sum"))
            total = got


class _Grid(_Exchange):
    """NeighborExchangeV2: the eight neighbors of a member in a grid give it a frame around its X;
    what has no neighbor is zero. Widths that differ between members are exchanged as the largest,
    and cut afterwards."""

    def build(self) -> list[NodeProto]:
        if self.attrs.get("data_format", b"NCHW") not in (b"NCHW", "NCHW"):
            self.fail(f"data_format={self.attrs['data_format'].decode()}: only NCHW is supported")
        sends, receives = (self.table(f"{key}_rank_ids", 8) for key in ("send", "recv"))
        give, take = (self._widths(f"{key}_lens") for key in ("send", "recv"))
        self._check(sends, receives, give, take)
        top, bottom, left, right = (max(each) for each in zip(*take, strict=True))
        self.longest = {"rows": max(top, bottom), "columns": max(left, right)}
        sizes = (top, None, bottom), (left, None, right)
        x = self.node.input[0]
        grid: list[list[str]] = [[""] * 3 for _ in range(3)]
        grid[1][1] = x
        for direction, (row, column) in enumerate(_PLACES):
            size = sizes[0][row], sizes[1][column]
            if 0 not in size:
                sources = [of[direction] for of in receives]
                region = self._slice(x, row, column, *size)
                grid[row][column] = self.permute(region, sources, self.fresh("got"))
        rows = [self._concat([p for p in pieces if p], 3) for pieces in grid if any(pieces)]
        whole = self._concat(rows, 2)
        frame = [top, bottom, left, right]
        if any(widths != frame for widths in take):
            whole = self._cut(whole, take, frame)
        self.add("Identity", [whole], self.node.output[0])
        return self.nodes

    def _widths(self, key: str) -> Table:
        """Four widths for each member: one list for all, or a row for each."""
        found = [int(n) for n in self.attrs.get(key, [])]
        if len(found) == 4:
            found = found * self.members
        if len(found) != 4 * self.members or min(found) < 0:
            self.fail(
                f"{key}={found}: give [top, bottom, left, right], each at least 0, for all "
                f"members, or such a list for each of the {self.members} members"
            )
        return [found[4 * i : 4 * i + 4] for i in range(self.members)]

    def _check(self, sends: Table, receives: Table, give: Table, take: Table) -> None:
        """Checks that members that send and receive, and their widths, fit together."""
        self._check_answers(receives, sends, "receives from", "sends to")
        self._check_answers(sends, receives, "sends to", "receives from")
        for member in range(self.members):
            for direction, other in enumerate(receives[member]):
                if other >= 0:
                    self._check_widths(member, direction, other, take[member], give[other])

    def _check_answers(self, own: Table, others: Table, does: str, answers: str) -> None:
        """Checks that whoever a member names names that member in the opposite direction."""
        for member, row in enumerate(own):
            for direction, other in enumerate(row):
                back = (direction + 4) % 8
                if other >= 0 and others[other][back] != member:
                    self.fail(
                        f"member {member} {does} member {other} in direction {direction}, but "
                        f"that one {answers} {others[other][back]} in direction {back}"
                    )

    def _check_widths(
        self, member: int, direction: int, other: int, take: list[int], give: list[int]
    ) -> None:
        row, column = _PLACES[direction]
        sides = [side for side in (_SIDES[0][row], _SIDES[1][column]) if side is not None]
        for side in sides:
            if take[side] != give[side ^ 1]:
                self.fail(
                    f"member {member} receives {take[side]} at its {_NAMES[side]} from member "
                    f"{other}, which sends {give[side ^ 1]} of its {_NAMES[side ^ 1]}"
                )

    def _slice(self, x: str, row: int, column: int, height: int | None, width: int | None) -> str:
        """What the neighbor in this direction holds next to this member: its last rows if it is
        above, its first ones if it is below."""
        starts, ends, axes = [], [], []
        for axis, place, size in ((2, row, height), (3, column, width)):
            if size is not None:
                starts.append(-size if place == 0 else 0)
                ends.append(_END if place == 0 else size)
                axes.append(axis)
        bounds = [self.constant(each) for each in (starts, ends, axes)]
        return self.add("Slice", [x, *bounds], self.fresh("region"))

    def _concat(self, pieces: Sequence[str], axis: int) -> str:
        if len(pieces) == 1:
            return pieces[0]
        return self.add("Concat", pieces, self.fresh("frame"), axis=axis)

    def _cut(self, whole: str, take: Table, frame: list[int]) -> str:
        """Cuts the frame of each member to its own widths."""
        starts = [[frame[0] - own[0], frame[2] - own[2]] for own in take]
        ends = [[own[side] - frame[side] or _END for side in (1, 3)] for own in take]
        rank = self.add("Rank", [], self.fresh("rank"), DOMAIN, **self.group)
        bounds = [
            self.add("Gather", [self.constant(rows), rank], self.fresh("bound"), axis=0)
            for rows in (starts, ends)
        ]
        return self.add("Slice", [whole, *bounds, self.constant([2, 3])], self.fresh("cut"))


def expand_exchanges(
    model: onnx.ModelProto, members: Callable[[NodeProto], int]
) -> list[_Exchange]:
    """Replaces the exchanges of a program, in place; `members` is a function from a node to the
    number of ranks in its largest group. Returns them, to check their sizes once types are known.
    Errors: StrategyError, naming the node, for lists that do not fit together."""
    found: list[_Exchange] = []
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if not _is_exchange(node):
            nodes.append(node)
            continue
        kind = _Grid if node.op_type == "NeighborExchangeV2" else _Lists
        exchange = kind(node, members(node))
        found.append(exchange)
        nodes += exchange.build()
        model.graph.initializer.extend(exchange.constants)
    if found:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return found
