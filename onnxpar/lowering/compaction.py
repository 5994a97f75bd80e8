"""Replaces a mixture by a Scan over its experts; the body computes one expert's tokens alone.

The number of these tokens is data-dependent: a NonZero in the body finds the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.origin import note_origin
from onnxpar.graph.per_rank import PerRank
from onnxpar.lowering.added_nodes import AddedNodes
from onnxpar.lowering.lowering_builder import rank_constant
from onnxpar.sharding.chosen_rows import RANK, ChosenRows, Shapes, flips


class Compaction:
    """Builds the Scan that replaces a mixture."""

    def __init__(
        self,
        graph: gs.Graph,
        mixture: ChosenRows,
        shapes: Shapes,
        width: Callable[[int], int],
        per_rank: PerRank,
    ) -> None:
        """`shapes` are global shapes; `width` gives the number of columns of a rank's result."""
        self.graph, self.mixture = graph, mixture
        self.shapes, self.width, self.per_rank = shapes, width, per_rank
        self.name = f"{mixture.total.name}::experts"
        self.sequences: list[gs.Tensor] = []
        self.elements: list[gs.Tensor] = []
        self.body = gs.Graph(name=self.name, opset=graph.opset)
        self.mapped: dict[int, gs.Tensor] = {}
        self.body_nodes = AddedNodes(self.name, mixture.total.name, self.body.nodes)

    def replace(self) -> None:
        """Replaces the nodes of the mixture by a Scan over experts."""
        mixture = self.mixture
        total = self.result = mixture.total.outputs[0]
        before = self._zeros()
        carried = gs.Variable(f"{self.name}/sum", total.dtype)
        rows = self._rows()
        for node in mixture.enter:
            self.mapped[id(node.outputs[0])] = self._entered(node, rows)
        for node in mixture.inside:
            self._copy(node, rows)
        y = self.mapped[id(mixture.leave.inputs[1])]
        y = self._add("Squeeze", [y], total.dtype, axes=[0])
        previous = self._add("Gather", [carried, rows], total.dtype, axis=0)
        sums = self._add("Add", [previous, y], total.dtype)
        places = self._add("Unsqueeze", [rows], np.int64, axes=[1])
        after = self._add("ScatterND", [carried, places, sums], total.dtype)
        self.body.inputs = [carried, *self.elements]
        self.body.outputs = [after]
        after.shape = [None, None]
        at = next(i for i, n in enumerate(self.graph.nodes) if n is mixture.total)
        for node in mixture.nodes:
            node.outputs.clear()
            node.inputs.clear()
        attrs = {"body": self.body, "num_scan_inputs": len(self.sequences)}
        scan = gs.Node("Scan", self.name, attrs, [before[-1].outputs[0], *self.sequences], [total])
        added_nodes = [*before, scan]
        note_origin(added_nodes, mixture.total.name)
        self.graph.nodes[at + 1 : at + 1] = added_nodes
        gone = {id(node) for node in mixture.nodes}
        self.graph.nodes[:] = [n for n in self.graph.nodes if id(n) not in gone]

    def _zeros(self) -> list[gs.Node]:
        """Nodes that compute a tensor of zeros with the shape of the result."""
        chosen, dtype = self.mixture.chosen, self.result.dtype

        def width(rank: int) -> Any:
            return np.array([self.width(rank)], np.int64)

        columns = rank_constant(f"{self.name}/columns", width(0), width, self.per_rank)
        nodes: list[gs.Node] = []

        def add(op: str, inputs: list[gs.Tensor], kind: Any, **attrs: Any) -> gs.Tensor:
            name = f"{self.name}/{op}"
            nodes.append(gs.Node(op, name, attrs, inputs, [gs.Variable(name, kind)]))
            result: gs.Tensor = nodes[-1].outputs[0]
            return result

        shape = add("Shape", [chosen], np.int64)
        one = gs.Constant(f"{self.name}/one", np.array([1], np.int64))
        count = add("Gather", [shape, one], np.int64, axis=0)
        sizes = add("Concat", [count, columns], np.int64, axis=0)
        filler = gs.Constant(f"{self.name}/zero", np.zeros(1, _numpy(dtype)))
        add("ConstantOfShape", [sizes], dtype, value=filler)
        return nodes

    def _rows(self) -> gs.Tensor:
        """The indices of the rows that the body's expert computes."""
        mask = self._element(self.mixture.chosen)
        places = self._add("NonZero", [mask], np.int64)
        zero = gs.Constant(f"{self.name}/first", np.array(0, np.int64))
        return self._add("Gather", [places, zero], np.int64, axis=0)

    def _entered(self, node: gs.Node, rows: gs.Tensor) -> gs.Tensor:
        """The operand rows of the body's expert, [1, row, column]."""
        tokens = node.inputs[1]
        if self._is_per_expert(tokens):
            tokens = self._element(tokens)
        elif len(self.shapes[tokens.name]) == RANK:
            return self._add("Gather", [tokens, rows], tokens.dtype, axis=1)
        selected = self._add("Gather", [tokens, rows], tokens.dtype, axis=0)
        return self._add("Unsqueeze", [selected], tokens.dtype, axes=[0])

    def _is_per_expert(self, tensor: gs.Tensor) -> bool:
        """True if a tensor's first dimension is the dimension of experts."""
        shape = self.shapes.get(tensor.name, ())
        return len(shape) == RANK and shape[0] == self.shapes[self.mixture.chosen.name][0]

    def _copy(self, node: gs.Node, rows: gs.Tensor) -> None:
        """Adds a copy of a node to the body; the copy computes the rows of one expert."""
        inputs = []
        for i, tensor in enumerate(node.inputs):
            if id(tensor) in self.mapped:
                inputs.append(self.mapped[id(tensor)])
            else:
                is_matrix = (node.op == "MatMul" and i == 1) or flips(node)
                inputs.append(self._outer(tensor, None if is_matrix else rows))
        outputs = [gs.Variable(f"{self.name}/{t.name}", t.dtype) for t in node.outputs]
        self.mapped |= {id(t): o for t, o in zip(node.outputs, outputs, strict=True)}
        self.body_nodes.copy(node, inputs, outputs)

    def _outer(self, tensor: gs.Tensor, rows: gs.Tensor | None) -> gs.Tensor:
        """An operand from outside the body, reduced to the body's expert, and to `rows` of it."""
        shape = self.shapes.get(tensor.name, ())
        at = len(shape) - 2  # the dimension of rows
        part = tensor
        if self._is_per_expert(tensor):
            part = self._element(tensor)
            part = self._add("Unsqueeze", [part], tensor.dtype, axes=[0])
        if rows is None or at < 0 or shape[at] != self.shapes[self.mixture.chosen.name][1]:
            return part
        return self._add("Gather", [part, rows], tensor.dtype, axis=at)

    def _element(self, tensor: gs.Tensor) -> gs.Tensor:
        """The part of a tensor of all experts that belongs to the body's expert."""
        for sequence, element in zip(self.sequences, self.elements, strict=True):
            if sequence is tensor:
                return element
        element = gs.Variable(f"{self.name}/expert.{len(self.elements)}", tensor.dtype)
        self.sequences.append(tensor)
        self.elements.append(element)
        return element

    def _add(self, op: str, inputs: list[Any], dtype: Any, **attrs: Any) -> gs.Variable:
        return self.body_nodes.add(op, inputs, dtype, **attrs)


def _numpy(dtype: Any) -> Any:
    return onnx.helper.tensor_dtype_to_np_dtype(dtype) if isinstance(dtype, int) else dtype
