"""Writes a mixture of experts and its backward pass for the chosen rows alone.

A pair is an expert and a row that the expert computes. Pairs are sorted by expert, and all tensors
of rows become [1, pair, column]. So elementwise nodes stay single nodes; a product with experts'
matrices takes each expert's range of pairs (Gale et al., "MegaBlocks", 2022). The forward and the
backward pass read the same pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.per_rank import PerRank
from onnxpar.graph.subgraphs import detach
from onnxpar.graph.tensors import numpy_dtype
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.lowering.added_nodes import AddedNodes
from onnxpar.lowering.lowering_builder import rank_constant
from onnxpar.lowering.pairs import Pairs
from onnxpar.sharding.chosen_rows import RANK, Shapes
from onnxpar.sharding.trained_rows import (
    ELEMENTWISE,
    Role,
    TrainedRows,
    before_experts,
    expert_matrix,
)

Tensors = Sequence[gs.Tensor]
_FLIP = [0, 2, 1]


class PairProgram:
    """Replaces the nodes of a mixture in a rank's graph, each in its place.

    shapes    global shapes of tensors, by name
    layouts   layouts of tensors, by name; each rank has at least one expert
    """

    def __init__(
        self, graph: gs.Graph, mixture: TrainedRows, shapes: Shapes, layouts: Mapping[str, Layout],
        mesh: Mesh, per_rank: PerRank,
    ) -> None:  # fmt: skip
        self.graph, self.mixture, self.shapes = graph, mixture, shapes
        self.layouts, self.mesh, self.per_rank = layouts, mesh, per_rank
        total = next(n for n in mixture.nodes if mixture.roles[id(n)] is Role.TOTAL)
        self.name = f"{total.name}::pairs"
        self.added = AddedNodes(self.name, total.name, [])
        self.add = self.added.add
        self.mapped: dict[int, gs.Tensor] = {}
        self.ranges: dict[int, list[gs.Tensor]] = {}
        counts = [self._local(mixture.chosen, rank)[0] for rank in range(mesh.size)]
        self.expert_counts, self.most, self.is_even = counts, max(counts), len(set(counts)) == 1

    def replace(self) -> None:
        """Replaces the nodes of the mixture."""
        mixture = self.mixture
        write: dict[Role, Callable[[gs.Node, Tensors, Tensors], None]] = {
            Role.MASK: self._mask,
            Role.FLIP: self._flip,
            Role.ROWS: self._rows,
            Role.REDUCED: self._reduced,
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
            role = mixture.roles[id(node)]
            write[role](node, inputs, outputs)
            for tensor in outputs:
                if id(tensor) in leaving and role is not Role.REDUCED:
                    self._leave(tensor, tensor)
        self.graph.nodes[:] = self.added.nodes
        self._drop_unread([t for inputs, _ in operands for t in inputs])

    def _begin(self) -> None:
        """Adds nodes that find the pairs, and the number of pairs of each expert."""
        self.pairs = Pairs(self.added, self.mixture.chosen, self.shapes)
        self.counts = self.add("ReduceSum", [self.pairs.picks], np.int64, axes=[1], keepdims=0)
        if not self.is_even:
            more = self._constant("more", lambda rank: [0] * (self.most - self.expert_counts[rank]))
            self.counts = self.add("Concat", [self.counts, more], np.int64, axis=0)
        self.experts = [self._expert_index(i) for i in range(self.most)]

    def _expert_index(self, expert: int) -> gs.Constant:
        """The index of an expert; on a rank with fewer experts, the index of its last expert."""
        return self._constant(
            f"expert.{expert}", lambda rank: [min(expert, self.expert_counts[rank] - 1)]
        )

    def _local(self, tensor: gs.Tensor, rank: int) -> tuple[int, ...]:
        return self.layouts[tensor.name].local_shape(self.mesh, rank)

    def _constant(
        self, name: str, value: Callable[[int], Any], dtype: Any = np.int64
    ) -> gs.Constant:
        def by_rank(rank: int) -> Array:
            return np.array(value(rank), dtype)

        return rank_constant(f"{self.name}/{name}", by_rank(0), by_rank, self.per_rank)

    def _mask(self, _: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        x = inputs[1]
        rows = self.mapped.get(id(x))
        if rows is None:
            source = before_experts(x, self.shapes)
            rows = self.pairs.beside(source)
            if len(self.shapes[source.name]) == 2:
                rows = self.pairs.as_rows(rows)
        self.mapped[id(outputs[0])] = rows

    def _flip(self, _: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Adds nothing: products transpose the rows of each expert."""

    def _rows(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        read = [self.mapped.get(id(t)) or self._outer(node, t) for t in inputs]
        results = [gs.Variable(f"{self.name}/{t.name}", t.dtype) for t in outputs]
        self.mapped |= {id(t): m for t, m in zip(outputs, results, strict=True)}
        self.added.copy(node, read, results)
        self.added.nodes[-1].attrs.pop("allowzero", None)

    def _reduced(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Reduces all rows, with zeros for rows that are not chosen: so ranks exchange as many
        bytes as the plan says, whatever the router chooses."""
        x = gs.Variable(f"{self.name}/{inputs[0].name}/all", inputs[0].dtype)
        self._leave(inputs[0], x)
        self.added.copy(node, [x], outputs)
        self.mapped[id(outputs[0])] = self.pairs.beside(outputs[0])

    def _outer(self, node: gs.Node, tensor: gs.Tensor) -> gs.Tensor:
        """Converts an operand of a row-wise node that is no tensor of pairs: a target shape becomes
        that of pairs, and an operand of an elementwise node becomes a tensor of pairs."""
        if node.op in ("Expand", "Reshape"):
            behind = self.add("Slice", [tensor, [2], [RANK + 1], [0]], np.int64)
            before = [1, 1] if node.op == "Expand" else [1, 0]  # 0: Reshape copies the size
            return self.add("Concat", [before, behind], np.int64, axis=0)
        return self.pairs.beside(tensor) if node.op in ELEMENTWISE else tensor

    def _parts(self, tensor: gs.Tensor) -> list[gs.Tensor]:
        """The rows of each expert, [1, row, column]; no rows for an expert that a rank lacks."""
        if id(tensor) not in self.ranges:
            x = self.mapped[id(tensor)]
            name = f"{x.name}/parts"
            parts = [gs.Variable(f"{name}.{i}", x.dtype) for i in range(self.most)]
            self.added.note(gs.Node("Split", name, {"axis": 1}, [x, self.counts], parts))
            self.ranges[id(tensor)] = parts
        return self.ranges[id(tensor)]

    def _product(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        (result,) = outputs
        stack, is_flipped = expert_matrix(inputs[1])
        products = []
        for part, number in zip(self._parts(inputs[0]), self.experts, strict=True):
            matrix = self.add("Gather", [stack, number], stack.dtype, axis=0)
            if is_flipped:
                matrix = self.add("Transpose", [matrix], stack.dtype, perm=_FLIP)
            products.append(self.add("MatMul", [part, matrix], result.dtype))
        joined = gs.Variable(f"{self.name}/{result.name}", result.dtype)
        self.mapped[id(result)] = self.add("Concat", products, result.dtype, joined, axis=1)

    def _matrices(self, _: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        left = self._parts(self.mixture.flipped[id(inputs[0])])
        products = []
        for a, b in zip(left, self._parts(inputs[1]), strict=True):
            flipped = self.add("Transpose", [a], a.dtype, perm=_FLIP)
            products.append(self.add("MatMul", [flipped, b], outputs[0].dtype))
        self._stack(products, outputs[0])

    def _vectors(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        keepdims, dtype = int(node.attrs.get("keepdims", 1)), outputs[0].dtype
        parts = self._parts(inputs[0])
        sums = [self.add("ReduceSum", [p], dtype, axes=[1], keepdims=keepdims) for p in parts]
        self._stack(sums, outputs[0])

    def _stack(self, parts: Sequence[gs.Tensor], result: gs.Tensor) -> None:
        """Concatenates the results of all experts, without the experts that a rank lacks."""
        if self.is_even:
            self.add("Concat", parts, result.dtype, result, axis=0)
            return
        joined = self.add("Concat", parts, result.dtype, axis=0)
        end = self._constant(f"{result.name}/experts", lambda rank: [self.expert_counts[rank]])
        self.add("Slice", [joined, [0], end, [0]], result.dtype, result)

    def _total(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        def row(rank: int) -> Any:
            return np.zeros((1, self._local(inputs[0], rank)[2]))

        zeros = self._constant(f"{outputs[0].name}/row", row, numpy_dtype(outputs[0]))
        keepdims = bool(node.attrs.get("keepdims", 1))
        self.pairs.sum(self.mapped[id(inputs[0])], outputs[0], zeros, keepdims)

    def _leave(self, tensor: gs.Tensor, written: gs.Tensor) -> None:
        """Writes all rows of a tensor for nodes outside the mixture; rows that are not chosen are
        zeros."""
        columns = self._constant(
            f"{tensor.name}/columns", lambda rank: [self._local(tensor, rank)[2]]
        )
        shape = self.add("Shape", [self.pairs.picks], np.int64)
        shape = self.add("Concat", [shape, columns], np.int64, axis=0)
        filler = gs.Constant(f"{self.name}/{tensor.name}/zero", np.zeros(1, numpy_dtype(tensor)))
        zeros = self.add("ConstantOfShape", [shape], tensor.dtype, value=filler)
        rows = self.add("Squeeze", [self.mapped[id(tensor)]], tensor.dtype, axes=[0])
        self.add("ScatterND", [zeros, self.pairs.places, rows], tensor.dtype, written)

    def _drop_unread(self, tensors: Tensors) -> None:
        """Removes nodes that repeat rows for each expert, or transpose matrices, if their results
        have no readers left."""
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
