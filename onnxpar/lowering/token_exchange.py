"""Exchanges only the chosen rows of a mixture between ranks.

A rank sorts its rows by chosen expert, and sends the rows to the ranks that have these experts:
first the numbers of rows, then the rows. The results come back in the same order, and the rank adds
up the results of each row. Sizes are data-dependent, and no row is dropped (Gale et al.,
"MegaBlocks", 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.per_rank import PerRank
from onnxpar.graph.subgraphs import detach
from onnxpar.graph.tensors import numpy_dtype
from onnxpar.lowering.added_nodes import AddedNodes
from onnxpar.lowering.pairs import Pairs
from onnxpar.sharding.expert_rows import RANK, ExpertRows, Role, Shapes
from onnxpar.sharding.mixtures import Crossing


class TokenExchange:
    """Replaces the exchanges of a mixture, which move all rows, by exchanges of chosen rows.

    columns  the sizes of a tensor on a rank, behind the dimensions of experts and rows
    tag      the tag of the collective that exchanges numbers of rows
    """

    def __init__(
        self, graph: gs.Graph, mixture: ExpertRows, moves: Crossing, shapes: Shapes,
        columns: Callable[[gs.Tensor, int], tuple[int, ...]], per_rank: PerRank, tag: int,
    ) -> None:  # fmt: skip
        self.graph, self.mixture, self.moves, self.shapes = graph, mixture, moves, shapes
        self.columns, self.per_rank, self.tag = columns, per_rank, tag
        self.name = f"{mixture.total.name}::exchange"
        self.added = AddedNodes(self.name, mixture.total.name, per_rank)
        self.add, self.constant = self.added.add, self.added.constant
        self.group = self._attribute(moves.there[0], "group")
        self.sizes = self._attribute(moves.there[0], "split_sizes")
        """The number of experts of each member of the group."""

    @property
    def counts(self) -> str:
        """The name of the collective that exchanges numbers of rows."""
        return f"{self.name}/counts"

    def replace(self) -> ExpertRows:
        """Replaces the nodes; returns the mixture of a rank's own experts and received rows."""
        mixture, moves = self.mixture, self.moves
        pairs = Pairs(self.added, mixture.chosen, self.shapes)
        counts = self.add("ReduceSum", [pairs.picks], np.int64, axes=[1], keepdims=0)
        sends, receives, arrived = self._amounts(counts)
        rows = [
            self._travel(there, self._rows_of(pairs, enter.inputs[1]), sends, receives)
            for enter, there in zip(self._enters(), moves.there, strict=True)
        ]
        local_mixture = self._mixture(rows, self._owners(arrived))
        back = self._travel(moves.back, local_mixture.total.outputs[0], receives, sends)
        mapped: dict[int, gs.Tensor] = {id(moves.back.outputs[0]): pairs.as_rows(back)}
        for node in moves.after:
            inputs = [mapped.get(id(t)) or pairs.beside(t) for t in node.inputs]
            if node.op in ("Expand", "Reshape"):
                inputs[1] = pairs.target_shape(node.op, node.outputs[0], self.columns)
            outputs = [gs.Variable(f"{self.name}/{t.name}", t.dtype) for t in node.outputs]
            mapped |= {id(t): o for t, o in zip(node.outputs, outputs, strict=True)}
            self.added.copy(node, inputs, outputs)
            self.added.nodes[-1].attrs.pop("allowzero", None)
        assert mixture.leave is not None
        self._finish(pairs, mapped[id(mixture.leave.inputs[1])])
        return local_mixture

    def _rows_of(self, pairs: Pairs, tokens: gs.Tensor) -> gs.Tensor:
        """The row of each pair, [pair, column]."""
        rows = pairs.beside(tokens)
        is_flat = len(self.shapes[tokens.name]) < RANK
        return rows if is_flat else self.add("Squeeze", [rows], tokens.dtype, axes=[0])

    def _enters(self) -> list[gs.Node]:
        """Returns, for each exchange on the way to the experts, the node that computes its
        operand."""
        return [node.inputs[0].inputs[0] for node in self.moves.there]

    def _attribute(self, node: gs.Node, key: str) -> Callable[[int], list[int]]:
        """An attribute of a collective as a function of the rank."""
        value = node.attrs[key]
        function: Callable[[int], list[int]] = self.per_rank.attributes.get(
            (node.name, key), lambda rank: list(value)
        )
        return function

    def _expert_count(self, rank: int) -> int:
        """The number of experts of a rank."""
        return self.sizes(rank)[self.group(rank).index(rank)]

    def _amounts(self, counts: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor, gs.Tensor]:
        """The numbers of rows that this rank sends to each member; receives from each member; and
        receives from each member for each of its experts."""

        def members(rank: int) -> Any:
            sizes = self.sizes(rank)
            return np.repeat(np.eye(len(sizes), dtype=np.int64), sizes, axis=1)

        by_member = self.add("Mul", [counts, self.constant("members", members)], np.int64)
        sends = self.add("ReduceSum", [by_member], np.int64, axes=[1], keepdims=0)
        attrs: dict[str, Callable[[int], Any]] = {
            "group": self.group,
            "split_sizes": self.sizes,
            "concat_sizes": lambda rank: [self._expert_count(rank)] * len(self.group(rank)),
        }
        for key, value in attrs.items():
            self.per_rank.attributes[self.counts, key] = value
        now = {key: value(0) for key, value in attrs.items()}
        arrived = gs.Variable(self.counts, np.int64, [None])
        node = gs.Node(
            "AllToAll", self.counts, {"split_axis": 0, "concat_axis": 0, "tag": self.tag} | now,
            [counts], [arrived], DOMAIN,
        )  # fmt: skip
        self.added.note(node)
        shape = self.constant("own", lambda rank: [-1, self._expert_count(rank)])
        by_expert = self.add("Reshape", [arrived, shape], np.int64)
        receives = self.add("ReduceSum", [by_expert], np.int64, axes=[1], keepdims=0)
        return sends, receives, arrived

    def _travel(
        self, node: gs.Node, x: gs.Tensor, sends: gs.Tensor, receives: gs.Tensor
    ) -> gs.Tensor:
        """Sends rows by an AllToAllV with the name, tag and group of the exchange `node`; `sends`
        and `receives` have the number of rows to and from each member."""
        y = gs.Variable(f"{self.name}/{node.name}", x.dtype)
        attrs = {"axis": 0, "tag": node.attrs["tag"], "group": node.attrs["group"]}
        exchange = gs.Node("AllToAllV", node.name, attrs, [x, sends, receives], [y], DOMAIN)
        for key in ("split_sizes", "concat_sizes"):
            self.per_rank.attributes.pop((node.name, key), None)
        self.added.note(exchange)
        return y

    def _owners(self, arrived: gs.Tensor) -> gs.Tensor:
        """[expert, row, 1]: True if this rank's expert computes the received row. Received rows are
        sorted by sender, then by expert."""
        count = self.add("ReduceSum", [arrived], np.int64, keepdims=0)
        number = self.add("Range", [0, count, 1], np.int64)
        row = self.add("Unsqueeze", [number], np.int64, axes=[1])
        shape = self.constant("shape", lambda rank: [-1, self._expert_count(rank)])
        last = self.constant("last", lambda rank: self._expert_count(rank) - 1)
        ends = self.add("CumSum", [arrived, 0], np.int64)
        begins = self.add("Sub", [ends, arrived], np.int64)
        ends, begins = (self.add("Reshape", [t, shape], np.int64) for t in (ends, begins))
        of_rank = self.add("Gather", [ends, last], np.int64, axis=1)
        passed = self.add("Cast", [self.add("LessOrEqual", [of_rank, row], bool)], np.int64, to=7)
        source = self.add("ReduceSum", [passed], np.int64, axes=[1], keepdims=0)
        begin, end = (self.add("Gather", [t, source], np.int64, axis=0) for t in (begins, ends))
        begun = self.add("LessOrEqual", [begin, row], bool)
        inside = self.add("And", [begun, self.add("Less", [row, end], bool)], bool)
        turned = self.add("Transpose", [inside], bool, perm=[1, 0])
        return self.add("Unsqueeze", [turned], bool, axes=[2])

    def _mixture(self, arrived: list[gs.Tensor], chosen: gs.Tensor) -> ExpertRows:
        """The mixture of the received rows: the experts' nodes, between new masks. `chosen`
        [expert, row, 1] is True if this rank's expert computes the row."""
        enter = []
        for node, there, rows in zip(self._enters(), self.moves.there, arrived, strict=True):
            mask = gs.Node("Where", f"{self.name}/{node.name}", {}, [chosen, rows, node.inputs[2]])
            mask.outputs = [there.outputs[0]]
            there.outputs.clear()
            enter.append(mask)
        result = self.moves.back.inputs[0]
        zero = gs.Constant(f"{self.name}/zero", np.zeros((), numpy_dtype(result)))
        left = gs.Variable(f"{self.name}/leave", result.dtype)
        leave = gs.Node("Where", left.name, {}, [chosen, result, zero], [left])
        results = gs.Variable(f"{self.name}/results", result.dtype)
        axes = gs.Constant(f"{self.name}/axes", np.array([0], np.int64))
        total = gs.Node("ReduceSum", self.mixture.total.name, {"keepdims": 0}, [left, axes])
        total.outputs = [results]
        inside = {id(node): self.mixture.roles[id(node)] for node in self.moves.inside}
        masks = {id(node): Role.MASK for node in (*enter, leave)}
        nodes = [*enter, *self.moves.inside, leave, total]
        self.added.nodes += nodes
        return ExpertRows(chosen, nodes, {**inside, **masks, id(total): Role.TOTAL})

    def _finish(self, pairs: Pairs, y: gs.Tensor) -> None:
        """Adds the sum of the results `y` over experts, and puts the new nodes in the place of the
        mixture's nodes."""
        mixture, moves = self.mixture, self.moves
        left, result = mixture.total.inputs[0], mixture.total.outputs[0]
        at = next(i for i, node in enumerate(self.graph.nodes) if node is mixture.total)
        experts = {id(node) for node in moves.inside}
        for node in mixture.nodes:
            if id(node) not in experts:
                detach(node)
                node.outputs.clear()

        def row(rank: int) -> Any:
            return np.zeros((1, 1, *self.columns(left, rank)))

        zeros = self.constant("row", row, numpy_dtype(result))
        keepdims = bool(mixture.total.attrs.get("keepdims", 1))
        pairs.sum([y], result, zeros, keepdims)
        gone = {id(node) for node in mixture.nodes}
        before, after = self.graph.nodes[:at], self.graph.nodes[at + 1 :]
        self.graph.nodes[:] = [
            *(node for node in before if id(node) not in gone),
            *self.added.nodes,
            *(node for node in after if id(node) not in gone),
        ]
