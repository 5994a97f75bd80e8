"""Exchanges only the chosen rows of a mixture of experts between ranks.

A rank sorts its rows by chosen expert, and sends the rows to the ranks that have these experts:
first the numbers of rows, then the rows. Results and, in a training step, gradients travel in the
same order. Sizes are data-dependent, and no row is dropped (Gale et al., "MegaBlocks", 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN
from onnxpar.lowering.added_nodes import AddedNodes
from onnxpar.lowering.pairs import Pairs
from onnxpar.sharding.expert_cut import crosses_to_experts


class TokenExchange:
    """Replaces the exchanges between ranks in a mixture of experts, which move all rows, by
    exchanges of chosen rows. A pair is an expert and a row that is chosen for it.

    nodes     gets the new nodes
    sent      the pairs of the rank's own rows, with all experts
    like      any of the exchanges of all rows, whose group and sizes count
    own       the number of experts of each rank
    tag       the tag of the collective that exchanges numbers of rows
    received  the pairs of the rank's own experts, with received rows
    """

    def __init__(
        self, nodes: AddedNodes, sent: Pairs, like: gs.Node, own: Sequence[int], tag: int
    ) -> None:
        self.nodes, self.add = nodes, nodes.add
        self.sent, self.own, self.tag = sent, own, tag
        self.group = self._attribute(like, "group")
        self.sizes = self._attribute(like, "split_sizes")
        """The number of experts of each member of the group."""
        self.sends, self.receives, self.arrived = self._amounts()
        owners = self._owners()
        # Received rows come from all ranks: no operand of experts has a value for each of them.
        shapes = {**sent.shapes, owners.name: (sent.experts, -1, 1)}
        self.received = Pairs(nodes, owners, shapes, own)

    @property
    def counts(self) -> str:
        """The name of the collective that exchanges the numbers of rows."""
        return f"{self.nodes.name}/counts"

    def move(self, node: gs.Node, rows: gs.Tensor) -> gs.Tensor:
        """Adds an exchange of chosen rows, with the name of the exchange of all rows, `node`;
        returns its result.

        To the ranks of experts, `rows` are the rows of the pairs `sent`, and the result has a row
        for each row that this rank receives. Back, `rows` are the rows of the pairs `received`, and
        the result has a row for each pair that this rank sent. All are [row, column].
        """
        if crosses_to_experts(node):
            return self._exchange(node, rows, self.sends, self.receives)
        rows = self.add("Gather", [rows, self._places], rows.dtype, axis=0)
        return self._exchange(node, rows, self.receives, self.sends)

    def _attribute(self, node: gs.Node, key: str) -> Callable[[int], list[int]]:
        """Returns a function from a rank to its value of an attribute of a collective."""
        value = node.attrs[key]
        function: Callable[[int], list[int]] = self.nodes.per_rank.attributes.get(
            (node.name, key), lambda rank: list(value)
        )
        return function

    def _amounts(self) -> tuple[gs.Tensor, gs.Tensor, gs.Tensor]:
        """Returns three tensors of numbers of rows: how many this rank sends to each member of the
        group, how many it receives from each member, and how many it receives from each member for
        each of its experts."""

        def members(rank: int) -> Any:
            sizes = self.sizes(rank)
            return np.repeat(np.eye(len(sizes), dtype=np.int64), sizes, axis=1)

        counts, per_rank = self.sent.counts, self.nodes.per_rank
        by_member = self.add("Mul", [counts, self.nodes.constant("members", members)], np.int64)
        sends = self.add("ReduceSum", [by_member], np.int64, axes=[1], keepdims=0)
        attrs: dict[str, Callable[[int], Any]] = {
            "group": self.group,
            "split_sizes": self.sizes,
            "concat_sizes": lambda rank: [self.own[rank]] * len(self.group(rank)),
        }
        for key, value in attrs.items():
            per_rank.attributes[self.counts, key] = value
        now = {key: value(0) for key, value in attrs.items()}
        arrived = gs.Variable(self.counts, np.int64, [None])
        node = gs.Node(
            "AllToAll", self.counts, {"split_axis": 0, "concat_axis": 0, "tag": self.tag} | now,
            [counts], [arrived], DOMAIN,
        )  # fmt: skip
        self.nodes.note(node)
        shape = self.nodes.constant("own", lambda rank: [-1, self.own[rank]])
        by_expert = self.add("Reshape", [arrived, shape], np.int64)
        receives = self.add("ReduceSum", [by_expert], np.int64, axes=[1], keepdims=0)
        return sends, receives, arrived

    def _exchange(
        self, node: gs.Node, x: gs.Tensor, sends: gs.Tensor, receives: gs.Tensor
    ) -> gs.Tensor:
        """Returns the rows that an AllToAllV brings, which has the name, tag and group of the
        exchange `node`. `sends` and `receives` have the number of rows to and from each member."""
        y = gs.Variable(f"{self.nodes.name}/{node.name}", x.dtype)
        attrs = {"axis": 0, "tag": node.attrs["tag"], "group": node.attrs["group"]}
        exchange = gs.Node("AllToAllV", node.name, attrs, [x, sends, receives], [y], DOMAIN)
        for key in ("split_sizes", "concat_sizes"):
            self.nodes.per_rank.attributes.pop((node.name, key), None)
        self.nodes.note(exchange)
        return y

    def _owners(self) -> gs.Tensor:
        """Returns a mask [expert, row, 1]: True where this rank's expert computes the received row.
        Received rows are sorted by sender, then by expert."""
        add, arrived = self.add, self.arrived
        number = add("Range", [0, add("ReduceSum", [arrived], np.int64, keepdims=0), 1], np.int64)
        row = add("Unsqueeze", [number], np.int64, axes=[1])
        shape = self.nodes.constant("shape", lambda rank: [-1, self.own[rank]])
        last = self.nodes.constant("last", lambda rank: self.own[rank] - 1)
        ends = add("CumSum", [arrived, 0], np.int64)
        begins = add("Sub", [ends, arrived], np.int64)
        ends, begins = (add("Reshape", [t, shape], np.int64) for t in (ends, begins))
        of_rank = add("Gather", [ends, last], np.int64, axis=1)
        passed = add("Cast", [add("LessOrEqual", [of_rank, row], bool)], np.int64, to=7)
        source = add("ReduceSum", [passed], np.int64, axes=[1], keepdims=0)
        begin, end = (add("Gather", [t, source], np.int64, axis=0) for t in (begins, ends))
        begun = add("LessOrEqual", [begin, row], bool)
        inside = add("And", [begun, add("Less", [row, end], bool)], bool)
        turned = add("Transpose", [inside], bool, perm=[1, 0])
        return add("Unsqueeze", [turned], bool, axes=[2])

    @cached_property
    def _places(self) -> gs.Tensor:
        """For each received row, the index of its pair: a received row belongs to one expert."""
        row = self.received.row
        count = self.add("Squeeze", [self.add("Shape", [row], np.int64)], np.int64, axes=[0])
        number = self.add("Range", [0, count, 1], np.int64)
        return self.add("ScatterElements", [row, row, number], np.int64, axis=0)
