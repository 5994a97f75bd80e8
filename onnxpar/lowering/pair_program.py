"""Writes a mixture of experts and its backward pass for the chosen rows alone.

The pairs of an expert and a row that it computes are sorted by expert, and all tensors of rows
become [1, pair, column]. So elementwise nodes stay single nodes; a product with experts' matrices
takes each expert's range of the pairs (Gale et al., "MegaBlocks", 2022). Both passes read the same
pairs.
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

    shapes    global shapes
    layouts   of the graph's tensors; each rank has at least one expert
    """

    def __init__(
        self, graph: gs.Graph, found: TrainedRows, shapes: Shapes, layouts: Mapping[str, Layout],
        mesh: Mesh, per_rank: PerRank,
    ) -> None:  # fmt: skip
        self.graph, self.found, self.shapes = graph, found, shapes
        self.layouts, self.mesh, self.per_rank = layouts, mesh, per_rank
        total = next(n for n in found.nodes if found.roles[id(n)] is Role.TOTAL)
        self.name = f"{total.name}::pairs"
        self.made = AddedNodes(self.name, total.name, [])
        self.add = self.made.add
        self.mapped: dict[int, gs.Tensor] = {}
        self.ranges: dict[int, list[gs.Tensor]] = {}
        own = [self._local(found.chosen, rank)[0] for rank in range(mesh.size)]
        self.own, self.most, self.is_even = own, max(own), len(set(own)) == 1

    def replace(self) -> None:
        """Replaces the nodes."""
        found = self.found
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
        leaving = {id(tensor) for tensor in found.leaving}
        operands = [(list(node.inputs), list(node.outputs)) for node in found.nodes]
        replaced = {id(node): each for node, each in zip(found.nodes, operands, strict=True)}
        for node in list(self.graph.nodes):
            if id(node) not in replaced:
                self.made.nodes.append(node)
                continue
            if node is found.nodes[0]:
                self._begin()
            inputs, outputs = replaced[id(node)]
            detach(node)
            node.outputs.clear()
            self.made.origin = node.name
            role = found.roles[id(node)]
            write[role](node, inputs, outputs)
            for tensor in outputs:
                if id(tensor) in leaving and role is not Role.REDUCED:
                    self._leave(tensor, tensor)
        self.graph.nodes[:] = self.made.nodes
        self._drop_unread([t for inputs, _ in operands for t in inputs])

    def _begin(self) -> None:
        """Finds the pairs, and how many each expert has."""
        self.pairs = Pairs(self.made, self.found.chosen, self.shapes)
        self.counts = self.add("ReduceSum", [self.pairs.picks], np.int64, axes=[1], keepdims=0)
        if not self.is_even:
            more = self._constant("more", lambda rank: [0] * (self.most - self.own[rank]))
            self.counts = self.add("Concat", [self.counts, more], np.int64, axis=0)
        self.experts = [self._number(i) for i in range(self.most)]

    def _number(self, expert: int) -> gs.Constant:
        """The number of an expert; of one that a rank has not, that of its last one."""
        return self._constant(f"expert.{expert}", lambda rank: [min(expert, self.own[rank] - 1)])

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
        found = self.mapped.get(id(x))
        if found is None:
            source = before_experts(x, self.shapes)
            found = self.pairs.beside(source)
            if len(self.shapes[source.name]) == 2:
                found = self.pairs.as_rows(found)
        self.mapped[id(outputs[0])] = found

    def _flip(self, _: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """Adds nothing: products transpose the rows of each expert."""

    def _rows(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        read = [self.mapped.get(id(t)) or self._outer(node, t) for t in inputs]
        made = [gs.Variable(f"{self.name}/{t.name}", t.dtype) for t in outputs]
        self.mapped |= {id(t): m for t, m in zip(outputs, made, strict=True)}
        self.made.copy(node, read, made)
        self.made.nodes[-1].attrs.pop("allowzero", None)

    def _reduced(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        """The ranks exchange as many bytes as the plan says, whatever a router chooses: the rows
        that are not chosen are zeros."""
        x = gs.Variable(f"{self.name}/{inputs[0].name}/all", inputs[0].dtype)
        self._leave(inputs[0], x)
        self.made.copy(node, [x], outputs)
        self.mapped[id(outputs[0])] = self.pairs.beside(outputs[0])

    def _outer(self, node: gs.Node, tensor: gs.Tensor) -> gs.Tensor:
        """An operand of a row-wise node that has no rows of experts."""
        if node.op in ("Expand", "Reshape"):
            behind = self.add("Slice", [tensor, [2], [RANK + 1], [0]], np.int64)
            before = [1, 1] if node.op == "Expand" else [1, 0]  # 0: as many as there are
            return self.add("Concat", [before, behind], np.int64, axis=0)
        return self.pairs.beside(tensor) if node.op in ELEMENTWISE else tensor

    def _parts(self, tensor: gs.Tensor) -> list[gs.Tensor]:
        """The rows of each expert, [1, row, column]; those of an expert that a rank has not are
        none."""
        if id(tensor) not in self.ranges:
            x = self.mapped[id(tensor)]
            name = f"{x.name}/parts"
            parts = [gs.Variable(f"{name}.{i}", x.dtype) for i in range(self.most)]
            self.made.note(gs.Node("Split", name, {"axis": 1}, [x, self.counts], parts))
            self.ranges[id(tensor)] = parts
        return self.ranges[id(tensor)]

    def _product(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        (result,) = outputs
        stack, is_flipped = expert_matrix(inputs[1])
        made = []
        for part, number in zip(self._parts(inputs[0]), self.experts, strict=True):
            matrix = self.add("Gather", [stack, number], stack.dtype, axis=0)
            if is_flipped:
                matrix = self.add("Transpose", [matrix], stack.dtype, perm=_FLIP)
            made.append(self.add("MatMul", [part, matrix], result.dtype))
        joined = gs.Variable(f"{self.name}/{result.name}", result.dtype)
        self.mapped[id(result)] = self.add("Concat", made, result.dtype, joined, axis=1)

    def _matrices(self, _: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        left = self._parts(self.found.flipped[id(inputs[0])])
        made = []
        for a, b in zip(left, self._parts(inputs[1]), strict=True):
            flipped = self.add("Transpose", [a], a.dtype, perm=_FLIP)
            made.append(self.add("MatMul", [flipped, b], outputs[0].dtype))
        self._stack(made, outputs[0])

    def _vectors(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        kept, dtype = int(node.attrs.get("keepdims", 1)), outputs[0].dtype
        parts = self._parts(inputs[0])
        made = [self.add("ReduceSum", [p], dtype, axes=[1], keepdims=kept) for p in parts]
        self._stack(made, outputs[0])

    def _stack(self, parts: Sequence[gs.Tensor], result: gs.Tensor) -> None:
        """Joins what each expert has; leaves out experts that a rank has not."""
        if self.is_even:
            self.add("Concat", parts, result.dtype, result, axis=0)
            return
        joined = self.add("Concat", parts, result.dtype, axis=0)
        end = self._constant(f"{result.name}/experts", lambda rank: [self.own[rank]])
        self.add("Slice", [joined, [0], end, [0]], result.dtype, result)

    def _total(self, node: gs.Node, inputs: Tensors, outputs: Tensors) -> None:
        def row(rank: int) -> Any:
            return np.zeros((1, self._local(inputs[0], rank)[2]))

        zeros = self._constant(f"{outputs[0].name}/row", row, numpy_dtype(outputs[0]))
        kept = bool(node.attrs.get("keepdims", 1))
        self.pairs.sum(self.mapped[id(inputs[0])], outputs[0], zeros, kept)

    def _leave(self, tensor: gs.Tensor, written: gs.Tensor) -> None:
        """Writes all rows of a tensor that other nodes read; those that are not chosen are
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
        """Removes nodes that repeated rows for each expert, or transposed matrices, if nothing else
        reads them."""
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
