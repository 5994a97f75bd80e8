"""Rewrites a mixture of experts, and its backward pass in a training step, such that experts
compute only the rows that are chosen for them.

A pair is an expert and a row that the expert computes. Pairs are sorted by expert, and the rows of
pairs are either "joined" in one tensor [1, pair, column], or "apart": a tensor [1, row, column] for
each expert. A product with experts' matrices takes each expert's range of pairs (Gale et al.,
"MegaBlocks", 2022). The forward and the backward pass read the same pairs. If ranks exchange rows,
a rank has two lists of pairs: of its own rows and all experts, and of its own experts and the rows
that it received.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.per_rank import PerRank
from onnxpar.graph.subgraphs import detach
from onnxpar.graph.tensors import numpy_dtype
from onnxpar.lowering.added_nodes import AddedNodes
from onnxpar.lowering.pairs import Pairs
from onnxpar.lowering.token_exchange import TokenExchange
from onnxpar.sharding.expert_rows import (
    ELEMENTWISE,
    RANK,
    ExpertRows,
    Role,
    Shapes,
    before_experts,
    expert_matrix,
)

Tensors = Sequence[gs.Tensor]
_FLIP = [0, 2, 1]
MOST_APART = 32
"""The most experts of a rank whose rows stay apart between products: the caches of a CPU hold the
rows of an expert, but each expert then has nodes of its own."""


class PairProgram:
    """Replaces the nodes of a mixture of experts in a rank's graph, each in its place, by nodes
    that compute only the chosen pairs: an expert, and a row that the router has chosen for it.

    graph    the graph of a rank
    mixture  the nodes of the mixture, each with its role

    shapes   global shapes of tensors, by name
    experts  the number of experts of each rank, at least one
    columns  the sizes of a tensor on a rank, behind the dimensions of experts and rows
    inside   if ranks exchange rows, the ids of the nodes whose results are at the ranks of experts
    tag      the tag of the collective that exchanges numbers of rows
    """

    def __init__(
        self, graph: gs.Graph, mixture: ExpertRows, shapes: Shapes, experts: Sequence[int],
        columns: Callable[[gs.Tensor, int], tuple[int, ...]], per_rank: PerRank,
        inside: Collection[int], tag: int,
    ) -> None:  # fmt: skip
        self.graph, self.mixture, self.shapes, self.experts = graph, mixture, shapes, experts
        self.columns, self.per_rank, self.inside, self.tag = columns, per_rank, inside, tag
        self.name = f"{mixture.total.name}::pairs"
        self.added = AddedNodes(self.name, mixture.total.name, per_rank)
        self.add, self.constant = self.added.add, self.added.constant
        self.joined: dict[int, gs.Tensor] = {}
        self.apart: dict[int, Tensors] = {}
        self.shared: dict[tuple[int, int], gs.Tensor] = {}

    @property
    def finder(self) -> str:
        """The name of the node that divides the numbers of the chosen rows among experts."""
        return f"{self.name}/rows"

    def replace(self) -> None:
        """Replaces each node of the mixture of experts, by the method for its role; all other nodes
        stay."""
        mixture = self.mixture
        write: dict[Role, Callable[[gs.Node, Tensors, Tensors], None]] = {
            Role.MASK: self._mask,
            Role.FLIP: self._flip,
            Role.ROWS: self._rows,
            Role.REDUCED: self._reduced,
            Role.CROSSING: self._crossing,
            Role.PRODUCT: self._product,
            Role.MATRICES: self._matrices,
            Role.VECTORS: self._vectors,
            Role.TOTAL: self._total,
        }
        leaving = {id(tensor) for tensor in mixture.leaving}
        operands = [(list(node.inputs), list(node.outputs)) for node in mixture.nodes]
        replaced = dict(zip(map(id, mixture.nodes), operands, strict=True))
        for node in list(self.graph.nodes):
            if id(node) not in replaced:
                self.added.nodes.append(node)
                continue
            if node is mixture.nodes[0]:
                self._begin()
            inputs, outputs = replaced[id(node)]
            detach(node)
            node.outputs.clear()
            self.added.origin = node.name
            is_inside = not self.inside or id(node) in self.inside
            self.pairs = self.computed if is_inside else self.sent
            role = mixture.roles[id(node)]
            write[role](node, inputs, outputs)
            for tensor in outputs:
                if id(tensor) in leaving:
                    self._leave(tensor, tensor)
        self.graph.nodes[:] = self.added.nodes
        self._drop_unread([t for inputs, _ in operands for t in inputs])

    def _begin(self) -> None:
        """Adds nodes that find the pairs of an expert and a row chosen for it. If ranks exchange
        rows, these are two lists: the pairs of the rank's own rows (`sent`), and the pairs of its
        own experts (`computed`)."""
        chosen, exchanges = self.mixture.chosen, self.mixture.of(Role.CROSSING)
        if exchanges:
            all_experts = [self.shapes[chosen.name][0]] * len(self.experts)
            self.sent = Pairs(self.added, chosen, self.shapes, all_experts)
            self.exchange = TokenExchange(
                self.added, self.sent, exchanges[0], self.experts, self.tag
            )
            self.computed = self.exchange.received
        else:
            self.sent = self.computed = Pairs(self.added, chosen, self.shapes, self.experts)
        self.row_numbers = self.computed.split(self.computed.row, 0, self.finder)

    @property
    def _is_joined(self) -> bool:
        """True where the rows of all experts are one tensor: before an exchange, and, with many
        experts, after it."""
        return self.pairs is not self.computed or self.pairs.most > MOST_APART

    def _has(self, tensor: gs.Tensor) -> bool:
        """True for a tensor [expert, row, column] that is replaced by the rows of the chosen pairs
        of expert and row."""
        return id(tensor) in self.joined or id(tensor) in self.apart

    def _pairs_of(self, tensor: gs.Tensor) -> gs.Tensor:
        """Returns the rows of `tensor` for the chosen pairs of expert and row, as one tensor [1,
        pair, column]."""
        if id(tensor) not in self.joined:
            parts = self.apart[id(tensor)]
            joined = gs.Variable(f"{self.name}/{tensor.name}", tensor.dtype)
            self.joined[id(tensor)] = self.add("Concat", parts, tensor.dtype, joined, axis=1)
        return self.joined[id(tensor)]

    def _parts(self, tensor: gs.Tensor) -> Tensors:
        """Returns the rows of `tensor` for the chosen pairs of expert and row, as a tensor [1, row,
        column] for each expert; without rows for an expert that a rank lacks."""
        if id(tensor) not in self.apart:
            x = self.joined[id(tensor)]
            self.apart[id(tensor)] = self.pairs.split(x, 1, f"{x.name}/parts")
        return self.apart[id(tensor)]

    def _mask(self, _: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Replaces the Where that zeros the rows that are not chosen: only the rows of chosen pairs
        of expert and row are left, gathered here unless its operand has only these already."""
        x, (result,) = inputs[1], outputs
        for form in (self.joined, self.apart):
            if id(x) in form:
                form[id(result)] = form[id(x)]
        if self._has(result):
            return
        source = before_experts(x, self.shapes)
        if self._is_joined or len(self.shapes[source.name]) == RANK:
            self.joined[id(result)] = self._rows_of(source)
        else:
            self._pick_parts(source, result)

    def _pick_parts(self, rows: gs.Tensor, result: gs.Tensor) -> None:
        """Makes `result` of the rows of each expert, gathered from `rows`, [row, column]."""
        parts = [self.add("Gather", [rows, r], rows.dtype, axis=0) for r in self.row_numbers]
        self.apart[id(result)] = [self.pairs.as_rows(part) for part in parts]

    def _crossing(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Replaces an exchange of all rows between ranks by an exchange of the chosen rows."""
        (x,), (result,) = inputs, outputs
        rows = self.add("Squeeze", [self._pairs_of(x)], x.dtype, axes=[0])
        moved = self.exchange.move(node, rows)
        if self.pairs is self.sent:
            self.joined[id(result)] = self.pairs.as_rows(moved)
        elif self._is_joined:
            rows = self.add("Gather", [moved, self.pairs.row], moved.dtype, axis=0)
            self.joined[id(result)] = self.pairs.as_rows(rows)
        else:
            self._pick_parts(moved, result)

    def _rows_of(self, tensor: gs.Tensor) -> gs.Tensor:
        """Returns the rows of a tensor [row, column] or [expert, row, column] for the chosen pairs
        of expert and row, as [1, pair, column]."""
        rows = self.pairs.beside(tensor)
        is_flat = len(self.shapes[tensor.name]) == RANK - 1
        return self.pairs.as_rows(rows) if is_flat else rows

    def _flip(self, _: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Drops a Transpose of rows: the products that read it transpose the rows of each expert
        themselves."""

    def _rows(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Replaces a node that computes each row by itself by copies that compute the rows of
        chosen pairs of expert and row: a single copy for all experts, or one for each."""
        if node.op in ("Expand", "Reshape"):
            inputs = [inputs[0], self.pairs.target_shape(node.op, outputs[0], self.columns)]
        if self._is_joined or not any(id(t) in self.apart for t in inputs):
            read = [self._joined_operand(node, t) for t in inputs]
            results = self._copy(node, read, outputs, "")
            self.joined |= {id(t): r for t, r in zip(outputs, results, strict=True)}
            return
        each = []
        for i in range(self.pairs.most):
            read = [self._part(node, t, i) for t in inputs]
            each.append(self._copy(node, read, outputs, f"@{i}"))
        self.apart |= {id(t): parts for t, *parts in zip(outputs, *each, strict=True)}

    def _copy(self, node: gs.Node, inputs: Tensors, outputs: Tensors, suffix: str) -> Tensors:
        """Adds a copy of a node with these operands, and returns its results, in place of
        `outputs`. `suffix` makes its names differ from the names of other copies."""
        results = [gs.Variable(f"{self.name}{suffix}/{t.name}", t.dtype) for t in outputs]
        self.added.copy(node, inputs, results)
        copy = self.added.nodes[-1]
        copy.name += suffix
        copy.attrs.pop("allowzero", None)
        self.per_rank.copy_attributes(node.name, copy.name)
        return results

    def _joined_operand(self, node: gs.Node, tensor: gs.Tensor) -> gs.Tensor:
        """Returns the operand in place of `tensor`, in the copy of a node for the rows of all
        experts."""
        if self._has(tensor):
            return self._pairs_of(tensor)
        return self.pairs.beside(tensor) if node.op in ELEMENTWISE else tensor

    def _part(self, node: gs.Node, tensor: gs.Tensor, expert: int) -> gs.Tensor:
        """Returns the operand in place of `tensor`, in the copy of a node for the rows of one
        expert."""
        if self._has(tensor):
            return self._parts(tensor)[expert]
        if node.op not in ELEMENTWISE:
            return tensor
        if self.pairs.is_of_experts(tensor):
            return self._of_expert(tensor, expert)
        if self.pairs.has_rows(tensor):
            self.joined[id(tensor)] = self._rows_of(tensor)
            return self._parts(tensor)[expert]
        return tensor

    def _of_expert(self, stack: gs.Tensor, expert: int) -> gs.Tensor:
        """Returns the matrix or vector of one expert, from the stack of all experts' tensors."""
        key = id(stack), expert
        if key not in self.shared:
            number = self.pairs.numbers[expert]
            self.shared[key] = self.add("Gather", [stack, number], stack.dtype, axis=0)
        return self.shared[key]

    def _reduced(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Replaces a reduction over ranks by that of the rows of chosen pairs of expert and row:
        ranks that hold partial sums of one tensor have the same pairs."""
        (self.joined[id(outputs[0])],) = self._copy(node, [self._pairs_of(inputs[0])], outputs, "")

    def _product(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Replaces a product of rows and experts' matrices by one product for each expert."""
        (result,) = outputs
        stack, is_flipped = expert_matrix(inputs[1])
        products: list[gs.Tensor] = []
        for i, part in enumerate(self._parts(inputs[0])):
            matrix = self._of_expert(stack, i)
            if is_flipped:
                matrix = self.add("Transpose", [matrix], stack.dtype, perm=[1, 0])
            products += self._copy(node, [part, matrix], [result], f"@{i}")
        self.apart[id(result)] = products

    def _matrices(self, _: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Replaces the product that gives the gradient of experts' matrices by one product for each
        expert."""
        left = self._parts(self.mixture.flipped[id(inputs[0])])
        products = []
        for a, b in zip(left, self._parts(inputs[1]), strict=True):
            flipped = self.add("Transpose", [a], a.dtype, perm=_FLIP)
            products.append(self.add("MatMul", [flipped, b], outputs[0].dtype))
        self._stack(products, outputs[0])

    def _vectors(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Replaces the sum over rows that gives the gradient of experts' vectors by one sum for
        each expert."""
        keepdims, dtype = int(node.attrs.get("keepdims", 1)), outputs[0].dtype
        parts = self._parts(inputs[0])
        sums = [self.add("ReduceSum", [p], dtype, axes=[1], keepdims=keepdims) for p in parts]
        self._stack(sums, outputs[0])

    def _stack(self, parts: Sequence[gs.Tensor], result: gs.Tensor) -> None:
        """Makes `result` by concatenating the results of all experts that a rank has."""
        if self.pairs.is_even:
            self.add("Concat", parts, result.dtype, result, axis=0)
            return
        joined = self.add("Concat", parts, result.dtype, axis=0)
        end = self.constant(f"{result.name}/experts", lambda rank: [self.experts[rank]])
        self.add("Slice", [joined, [0], end, [0]], result.dtype, result)

    def _total(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Replaces the sum over experts: adds up, for each row, the rows of its chosen experts."""
        x = inputs[0]

        def row(rank: int) -> Any:
            return np.zeros((1, 1, *self.columns(x, rank)))

        zeros = self.constant(f"{outputs[0].name}/row", row, numpy_dtype(outputs[0]))
        keepdims = bool(node.attrs.get("keepdims", 1))
        parts = self.apart.get(id(x)) or [self._pairs_of(x)]
        self.pairs.sum(parts, outputs[0], zeros, keepdims)

    def _leave(self, tensor: gs.Tensor, written: gs.Tensor) -> None:
        """Writes all rows of `tensor`, as `written`, for nodes outside of the mixture, [expert,
        row, column]: rows that are not chosen are zeros."""
        columns = self.constant(f"{tensor.name}/columns", lambda rank: self.columns(tensor, rank))
        shape = self.add("Shape", [self.pairs.picks], np.int64)
        shape = self.add("Concat", [shape, columns], np.int64, axis=0)
        filler = gs.Constant(f"{self.name}/{tensor.name}/zero", np.zeros(1, numpy_dtype(tensor)))
        zeros = self.add("ConstantOfShape", [shape], tensor.dtype, value=filler)
        rows = self.add("Squeeze", [self._pairs_of(tensor)], tensor.dtype, axes=[0])
        self.add("ScatterND", [zeros, self.pairs.places, rows], tensor.dtype, written)

    def _drop_unread(self, tensors: Tensors) -> None:
        """Removes the nodes that make these tensors, if nothing reads them any more: nodes that
        repeat rows for each expert, or transpose matrices."""
        ports, gone, todo = {id(t) for t in self.graph.outputs}, set(), list(tensors)
        while todo:
            tensor = todo.pop()
            node = tensor.inputs[0] if tensor.inputs else None
            if node is None or tensor.outputs or id(tensor) in ports:
                continue
            if node.op in ("Expand", "Transpose"):
                gone.add(id(node))
                todo += node.inputs[:1]
                detach(node)
                node.outputs.clear()
        if gone:
            self.graph.nodes[:] = [n for n in self.graph.nodes if id(n) not in gone]
