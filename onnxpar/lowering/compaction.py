"""Makes a Scan over the experts of a mixture; its body computes the tokens of one expert alone.

Their number is data-dependent: NonZero in the body finds them.
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
from onnxpar.lowering.unroll_experts import EXPERTS
from onnxpar.sharding.chosen_rows import RANK, ChosenRows, Shapes, flips


class Compaction:
    """Builds the Scan that replaces a mixture."""

    def __init__(
        self,
        graph: gs.Graph,
        found: ChosenRows,
        shapes: Shapes,
        width: Callable[[int], int],
        per_rank: PerRank,
    ) -> None:
        """`shapes` has global shapes; `width` is the number of columns of a rank's result."""
        self.graph, self.found = graph, found
        self.shapes, self.width, self.per_rank = shapes, width, per_rank
        self.name = f"{found.total.name}{EXPERTS}"
        self.sequences: list[gs.Tensor] = []
        self.elements: list[gs.Tensor] = []
        self.body = gs.Graph(name=self.name, opset=graph.opset)
        self.mapped: dict[int, gs.Tensor] = {}
        self.body_nodes = AddedNodes(self.name, found.total.name, self.body.nodes)

    @property
    def finder(self) -> str:
        """The name of the node in the body that finds the rows of an expert."""
        return f"{self.name}/NonZero.0"

    def replace(self) -> None:
        """Replaces the nodes of the mixture by a Scan over experts."""
        found = self.found
        total = self.result = found.total.outputs[0]
        before = self._zeros()
        carried = gs.Variable(f"{self.name}/sum", total.dtype)
        rows = self._rows()
        for node in found.enter:
            self.mapped[id(node.outputs[0])] = self._entered(node, rows)
        for node in found.inside:
            self._copy(node, rows)
        y = self.mapped[id(found.leave.inputs[1])]
        y = self._add("Squeeze", [y], total.dtype, axes=[0])
        held = self._add("Gather", [carried, rows], total.dtype, axis=0)
        added = self._add("Add", [held, y], total.dtype)
        places = self._add("Unsqueeze", [rows], np.int64, axes=[1])
        after = self._add("ScatterND", [carried, places, added], total.dtype)
        self.body.inputs = [carried, *self.elements]
        self.body.outputs = [after]
        after.shape = [None, None]
        at = next(i for i, n in enumerate(self.graph.nodes) if n is found.total)
        for node in found.nodes:
            node.outputs.clear()
            node.inputs.clear()
        attrs = {"body": self.body, "num_scan_inputs": len(self.sequences)}
        scan = gs.Node("Scan", self.name, attrs, [before[-1].outputs[0], *self.sequences], [total])
        made = [*before, scan]
        note_origin(made, found.total.name)
        self.graph.nodes[at + 1 : at + 1] = made
        gone = {id(node) for node in found.nodes}
        self.graph.nodes[:] = [n for n in self.graph.nodes if id(n) not in gone]

    def _zeros(self) -> list[gs.Node]:
        """Nodes that compute zeros of the shape of the result."""
        chosen, dtype = self.found.chosen, self.result.dtype

        def width(rank: int) -> Any:
            return np.array([self.width(rank)], np.int64)

        columns = rank_constant(f"{self.name}/columns", width(0), width, self.per_rank)
        made: list[gs.Node] = []

        def add(op: str, inputs: list[gs.Tensor], kind: Any, **attrs: Any) -> gs.Tensor:
            name = f"{self.name}/{op}"
            made.append(gs.Node(op, name, attrs, inputs, [gs.Variable(name, kind)]))
            result: gs.Tensor = made[-1].outputs[0]
            return result

        shape = add("Shape", [chosen], np.int64)
        one = gs.Constant(f"{self.name}/one", np.array([1], np.int64))
        count = add("Gather", [shape, one], np.int64, axis=0)
        sizes = add("Concat", [count, columns], np.int64, axis=0)
        filler = gs.Constant(f"{self.name}/zero", np.zeros(1, _numpy(dtype)))
        add("ConstantOfShape", [sizes], dtype, value=filler)
        return made

    def _rows(self) -> gs.Tensor:
        """The numbers of the rows of the body's expert."""
        mask = self._element(self.found.chosen)
        places = self._add("NonZero", [mask], np.int64)
        assert places.name == self.finder
        zero = gs.Constant(f"{self.name}/first", np.array(0, np.int64))
        return self._add("Gather", [places, zero], np.int64, axis=0)

    def _entered(self, node: gs.Node, rows: gs.Tensor) -> gs.Tensor:
        """The rows of an expert, [1, row, column]."""
        tokens = node.inputs[1]
        if self._is_each(tokens):
            tokens = self._element(tokens)
        elif len(self.shapes[tokens.name]) == RANK:
            return self._add("Gather", [tokens, rows], tokens.dtype, axis=1)
        found = self._add("Gather", [tokens, rows], tokens.dtype, axis=0)
        return self._add("Unsqueeze", [found], tokens.dtype, axes=[0])

    def _is_each(self, tensor: gs.Tensor) -> bool:
        """True if the first dimension of a tensor is the expert."""
        shape = self.shapes.get(tensor.name, ())
        return len(shape) == RANK and shape[0] == self.shapes[self.found.chosen.name][0]

    def _copy(self, node: gs.Node, rows: gs.Tensor) -> None:
        """Adds a copy of a node, which reads the body's expert alone."""
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
        """An operand from outside of the body: that of the body's expert, and its rows alone."""
        shape = self.shapes.get(tensor.name, ())
        at = len(shape) - 2  # the dimension of rows
        found = tensor
        if self._is_each(tensor):
            found = self._element(tensor)
            found = self._add("Unsqueeze", [found], tensor.dtype, axes=[0])
        if rows is None or at < 0 or shape[at] != self.shapes[self.found.chosen.name][1]:
            return found
        return self._add("Gather", [found, rows], tensor.dtype, axis=at)

    def _element(self, tensor: gs.Tensor) -> gs.Tensor:
        """The body's expert of a tensor of all experts."""
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
