"""Expands MindSpore's NeighborExchange and NeighborExchangeV2 in a manual program to collective
permutes.

One program serves all ranks, so lists of ranks become tables with a row for each member of the
group. Each permute sends the tensors that members send in one direction; the gradients are the
gradients of the permutes.
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
"""The index of a side in a list of widths, by row and by column of the grid."""
_END = np.iinfo(np.int64).max

Table = list[list[int]]


def _is_exchange(node: NodeProto) -> bool:
    """True for a node with MindSpore's attributes. A NeighborExchange with `before` and `after` is
    the plugin's own op."""
    if node.domain != DOMAIN or node.op_type not in ("NeighborExchange", "NeighborExchangeV2"):
        return False
    return not {"before", "after"} & {a.name for a in node.attribute}


class _Exchange:
    """Collects the nodes that replace one exchange."""

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
        """An attribute as a table with a row for each member; its entries are indices into the
        group, or -1."""
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
        """Checks that X has as many rows and columns as the slices of it need, once types are
        known: a Slice returns fewer without an error."""
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
    output j from the j-th member of its other list. The k-th tensor that member A sends to member B
    is the k-th tensor that B receives from A."""

    def build(self) -> list[NodeProto]:
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
            self._sum(y, [(inputs[i], of) for i, of in parts[j]])
        return self.nodes

    def _sum(self, y: str, parts: Sequence[tuple[str, list[int]]]) -> None:
        """Adds up permutes. Each member receives from at most one of them, and zeros from the
        others."""
        total = ""
        for n, (x, sources) in enumerate(parts):
            is_last = n + 1 == len(parts)
            received = self.permute(x, sources, y if len(parts) == 1 else self.fresh("got"))
            if total:
                received = self.add("Add", [total, received], y if is_last else self.fresh("sum"))
            total = received


class _Grid(_Exchange):
    """NeighborExchangeV2: the eight neighbors of a member in a grid give the member a frame around
    its X, with zeros where it has no neighbor. If widths differ between members, all members
    exchange the largest widths, and cut their frames afterwards."""

    def build(self) -> list[NodeProto]:
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
                grid[row][column] = self.permute(region, sources, self.fresh("got"))
        rows = [self._concat([p for p in pieces if p], 3) for pieces in grid if any(pieces)]
        whole = self._concat(rows, 2)
        frame = [north, south, west, east]
        if any(widths != frame for widths in take):
            whole = self._cut(whole, take, frame)
        self.add("Identity", [whole], self.node.output[0])
        return self.nodes

    def _widths(self, key: str) -> Table:
        """The four widths of each member, from one list for all members or a row for each
        member."""
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
        """Checks that senders and receivers agree, and that their widths do."""
        self._check_answers(receives, sends, "receives from", "sends to")
        self._check_answers(sends, receives, "sends to", "receives from")
        for member in range(self.members):
            for direction, other in enumerate(receives[member]):
                if other >= 0:
                    self._check_widths(member, direction, other, take[member], give[other])

    def _check_answers(self, table: Table, opposite: Table, does: str, answers: str) -> None:
        """Checks that if member A names member B in `table`, B names A in the opposite direction of
        `opposite`."""
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
        row, column = _PLACES[direction]
        sides = [side for side in (_SIDES[0][row], _SIDES[1][column]) if side is not None]
        for side in sides:
            if take[side] != give[side ^ 1]:
                self.fail(
                    f"member {member} receives {take[side]} at its {_NAMES[side]} from member "
                    f"{other}, which sends {give[side ^ 1]} of its {_NAMES[side ^ 1]}"
                )

    def _slice(self, x: str, row: int, column: int, height: int | None, width: int | None) -> str:
        """The part of X that the neighbor in this direction sends: its last rows if it is above
        this member, its first rows if it is below."""
        starts, ends, axes = [], [], []
        for axis, place, size in ((2, row, height), (3, column, width)):
            if size is not None:
                starts.append(-size if place == 0 else 0)
                ends.append(_END if place == 0 else size)
                axes.append(axis)
        bounds = [self.constant(bound) for bound in (starts, ends, axes)]
        return self.add("Slice", [x, *bounds], self.fresh("region"))

    def _concat(self, pieces: Sequence[str], axis: int) -> str:
        if len(pieces) == 1:
            return pieces[0]
        return self.add("Concat", pieces, self.fresh("frame"), axis=axis)

    def _cut(self, whole: str, take: Table, frame: list[int]) -> str:
        """Cuts the frame of each member to its own widths."""
        starts = [[frame[0] - widths[0], frame[2] - widths[2]] for widths in take]
        ends = [[widths[side] - frame[side] or _END for side in (1, 3)] for widths in take]
        rank = self.add("Rank", [], self.fresh("rank"), DOMAIN, **self.group)
        bounds = [
            self.add("Gather", [self.constant(rows), rank], self.fresh("bound"), axis=0)
            for rows in (starts, ends)
        ]
        return self.add("Slice", [whole, *bounds, self.constant([2, 3])], self.fresh("cut"))


def expand_exchanges(
    model: onnx.ModelProto, members: Callable[[NodeProto], int]
) -> list[_Exchange]:
    """Replaces the exchanges of a program, in place. `members` is a function from a node to the
    number of ranks in its largest group. Returns the exchanges, so that the caller can check their
    sizes once types are known. Errors: StrategyError, naming the node, for lists that do not fit
    together."""
    exchanges: list[_Exchange] = []
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if not _is_exchange(node):
            nodes.append(node)
            continue
        kind = _Grid if node.op_type == "NeighborExchangeV2" else _Lists
        exchange = kind(node, members(node))
        exchanges.append(exchange)
        nodes += exchange.build()
        model.graph.initializer.extend(exchange.constants)
    if exchanges:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return exchanges
