"""Finds the nodes that compute rows of which a mask chooses some, and makes a Scan over experts of
them that computes the chosen rows alone.

    x: [expert, row, column] = Where(chosen, tokens, 0)
    ...    row-wise nodes
    y: [row, column] = ReduceSum(Where(chosen, z, 0), axis 0)

Rows that are not chosen add zeros to y, so that they need not be computed. Their number is
data-dependent: NonZero in the body of the Scan finds the rows of one expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.canonicalize.row_program import BINARY, UNARY
from onnxpar.ir.origin import note_origin
from onnxpar.ir.per_rank import PerRank
from onnxpar.ir.tensors import constant, given, tensor_shape
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.lowering.lowering_builder import rank_constant

_RANK = 3
_ELEMENTWISE = UNARY | BINARY
_ALONG_COLUMNS = frozenset(["Slice", "Split", "Softmax", "ReduceMean", "ReduceSum", "ReduceMax"])


@dataclass
class ChosenRows:
    """A mixture in a rank's graph.

    chosen  [expert, row, 1]: which rows an expert computes
    enter   the Where nodes that give experts their rows
    inside  the row-wise nodes, in graph order
    leave   the Where after them, and `total`, the ReduceSum that reads it
    """

    chosen: gs.Tensor
    leave: gs.Node
    total: gs.Node
    enter: list[gs.Node] = field(default_factory=list)
    inside: list[gs.Node] = field(default_factory=list)

    @property
    def nodes(self) -> list[gs.Node]:
        """All nodes that the Scan replaces."""
        return [*self.enter, *self.inside, self.leave, self.total]


def find_chosen_rows(
    graph: gs.Graph, layouts: Mapping[str, Layout], mesh: Mesh
) -> Iterator[ChosenRows]:
    """The mixtures of a rank's graph in which each rank has an expert, and in which all nodes
    between the masks are row-wise."""
    outputs = {id(t) for t in graph.outputs}
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not _is_mask(node, layouts) or len(node.outputs[0].outputs) != 1:
            continue
        (total,) = node.outputs[0].outputs
        layout = layouts[node.inputs[0].name]
        if not _sums_experts(total) or id(node.outputs[0]) in outputs or id(total) not in order:
            continue
        if all(layout.local_shape(mesh, rank)[0] for rank in range(mesh.size)):
            found = ChosenRows(node.inputs[0], node, total)
            if _fill(found, layouts, outputs, order):
                yield found


def _is_mask(node: gs.Node, layouts: Mapping[str, Layout]) -> bool:
    """True for Where(chosen, x, 0) on [expert, row, column]."""
    if node.op != "Where" or node.domain not in (None, "", "ai.onnx"):
        return False
    zero = constant(node.inputs[2]) if isinstance(node.inputs[2], gs.Constant) else None
    layout = layouts.get(node.inputs[0].name)
    is_zero = zero is not None and zero.size == 1 and not zero.any()
    return is_zero and layout is not None and len(layout.shape) == _RANK and layout.shape[2] == 1


def _sums_experts(node: gs.Node) -> bool:
    if node.op != "ReduceSum" or node.attrs.get("keepdims", 1):
        return False
    axes = node.attrs.get("axes")
    operand = given(node, 1)
    if axes is None and operand is not None:
        value = constant(operand)
        axes = None if value is None else value.tolist()
    return bool(axes == [0])


def _fill(
    found: ChosenRows, layouts: Mapping[str, Layout], outputs: Collection[int],
    order: Mapping[int, int],
) -> bool:  # fmt: skip
    """Collects the nodes between the masks; False if one of them is not row-wise, or if anything
    else reads its results."""
    inside: dict[int, gs.Node] = {}
    enter: dict[int, gs.Node] = {}
    todo = [found.leave.inputs[1]]
    while todo:
        tensor = todo.pop()
        node = tensor.inputs[0] if tensor.inputs else None
        if node is None or id(node) in inside or id(node) in enter:
            continue
        if _is_mask(node, layouts) and node.inputs[0] is found.chosen:
            enter[id(node)] = node
        elif id(node) in order and _computes_rows(node, found.chosen, layouts):
            inside[id(node)] = node
            todo += [t for t in node.inputs if t.name and not isinstance(t, gs.Constant)]
    _shrink(inside, enter)
    kept = {*inside, *enter, id(found.leave)}
    for node in (*inside.values(), *enter.values()):
        for tensor in node.outputs:
            if id(tensor) in outputs or any(id(r) not in kept for r in tensor.outputs):
                return False
    found.inside = sorted(inside.values(), key=lambda n: order[id(n)])
    found.enter = sorted(enter.values(), key=lambda n: order[id(n)])
    start = found.leave.inputs[1]
    if not enter or not start.inputs or id(start.inputs[0]) not in inside:
        return False
    return all(_is_row_wise(n, kept, layouts) for n in found.inside) and all(
        n.inputs[1].name in layouts for n in found.enter
    )


def _computes_rows(node: gs.Node, chosen: gs.Tensor, layouts: Mapping[str, Layout]) -> bool:
    """True if results have the experts and rows of the mask as their first dimensions, or if the
    node transposes the experts' matrices."""
    shape = layouts[chosen.name].shape
    for tensor in node.outputs:
        layout = layouts.get(tensor.name)
        if layout is None or len(layout.shape) != _RANK or layout.shape[0] != shape[0]:
            return False
        if layout.shape[1] != shape[1] and not _flips(node):
            return False
    return True


def _flips(node: gs.Node) -> bool:
    return node.op == "Transpose" and list(node.attrs.get("perm") or ()) == [0, 2, 1]


def _shrink(inside: dict[int, gs.Node], enter: Mapping[int, gs.Node]) -> None:
    """Leaves out nodes that do not depend on the rows that enter, except those that transpose
    matrices of products."""
    depends: dict[int, bool] = {}

    def reads_rows(node: gs.Node) -> bool:
        if id(node) not in depends:
            depends[id(node)] = False
            makers = [maker for t in node.inputs for maker in t.inputs]
            depends[id(node)] = any(
                id(m) in enter or (id(m) in inside and reads_rows(m)) for m in makers
            )
        return depends[id(node)]

    def is_matrix(node: gs.Node) -> bool:
        readers = node.outputs[0].outputs
        return _flips(node) and all(r.op == "MatMul" and id(r) in inside for r in readers)

    for i in [i for i, n in inside.items() if not reads_rows(n) and not is_matrix(n)]:
        del inside[i]


def _is_row_wise(node: gs.Node, kept: Collection[int], layouts: Mapping[str, Layout]) -> bool:
    """True if each row of the results depends on the same row of the operands alone."""
    if node.domain not in (None, "", "ai.onnx") and node.op != "QuickGelu":
        return False
    if _flips(node):
        return node.inputs[0].name in layouts
    if node.op == "MatMul":
        weight = node.inputs[1]
        made = weight.inputs[0] if weight.inputs else None
        is_matrix = made is None or id(made) not in kept or _flips(made)
        return is_matrix and weight.name in layouts
    if node.op in _ELEMENTWISE:
        others = [t for t in node.inputs if t.name and not (t.inputs and id(t.inputs[0]) in kept)]
        return all(
            (isinstance(t, gs.Constant) and set(tensor_shape(t) or ()) <= {1})
            or (t.name in layouts and len(layouts[t.name].shape) <= _RANK)
            for t in others
        )
    return node.op in _ALONG_COLUMNS and _axis(node) == [2]


def _axis(node: gs.Node) -> list[int] | None:
    """The dimensions along which a node works."""
    if node.op in ("Split", "Softmax"):
        return [int(node.attrs.get("axis", 0 if node.op == "Split" else -1)) % _RANK]
    axes = node.attrs.get("axes")
    operand = given(node, 3 if node.op == "Slice" else 1)
    if axes is None and operand is not None and isinstance(operand, gs.Constant):
        axes = operand.values.reshape(-1).tolist()
    if axes is None or (node.op.startswith("Reduce") and not node.attrs.get("keepdims", 1)):
        return None
    return [int(a) % _RANK for a in axes]


class Compaction:
    """Builds the Scan that replaces a mixture."""

    def __init__(
        self, graph: gs.Graph, found: ChosenRows, layouts: Mapping[str, Layout], mesh: Mesh,
        per_rank: PerRank,
    ) -> None:  # fmt: skip
        self.graph, self.found = graph, found
        self.layouts, self.mesh, self.per_rank = layouts, mesh, per_rank
        self.name = f"{found.total.name}::experts"
        self.sequences: list[gs.Tensor] = []
        self.elements: list[gs.Tensor] = []
        self.body = gs.Graph(name=self.name, opset=graph.opset)
        self.mapped: dict[int, gs.Tensor] = {}
        self.count = 0

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
        layout = self.layouts[self.found.leave.outputs[0].name]

        def width(rank: int) -> Any:
            return np.array([layout.local_shape(self.mesh, rank)[2]], np.int64)

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
        zero = gs.Constant(f"{self.name}/first", np.array(0, np.int64))
        return self._add("Gather", [places, zero], np.int64, axis=0)

    def _entered(self, node: gs.Node, rows: gs.Tensor) -> gs.Tensor:
        """The rows of an expert, [1, row, column]."""
        tokens = node.inputs[1]
        layout = self.layouts[tokens.name]
        if self._is_each(tokens):
            tokens = self._element(tokens)
        elif len(layout.shape) == _RANK:
            return self._add("Gather", [tokens, rows], tokens.dtype, axis=1)
        found = self._add("Gather", [tokens, rows], tokens.dtype, axis=0)
        return self._add("Unsqueeze", [found], tokens.dtype, axes=[0])

    def _is_each(self, tensor: gs.Tensor) -> bool:
        """True if the first dimension of a tensor is the expert."""
        layout = self.layouts.get(tensor.name)
        count = self.layouts[self.found.chosen.name].shape[0]
        return layout is not None and len(layout.shape) == _RANK and layout.shape[0] == count

    def _copy(self, node: gs.Node, rows: gs.Tensor) -> None:
        """Adds a copy of a node, which reads the body's expert alone."""
        inputs = []
        for i, tensor in enumerate(node.inputs):
            if id(tensor) in self.mapped:
                inputs.append(self.mapped[id(tensor)])
            else:
                is_matrix = (node.op == "MatMul" and i == 1) or _flips(node)
                inputs.append(self._outer(tensor, None if is_matrix else rows))
        outputs = [gs.Variable(f"{self.name}/{t.name}", t.dtype) for t in node.outputs]
        self.mapped |= {id(t): o for t, o in zip(node.outputs, outputs, strict=True)}
        copy = gs.Node(node.op, node.name, dict(node.attrs), inputs, outputs, node.domain)
        copy.onnx_source = vars(node).get("onnx_source")
        self.body.nodes.append(copy)

    def _outer(self, tensor: gs.Tensor, rows: gs.Tensor | None) -> gs.Tensor:
        """An operand from outside of the body: that of the body's expert, and its rows alone."""
        layout = self.layouts.get(tensor.name)
        if not tensor.name or layout is None or len(layout.shape) < _RANK:
            return tensor
        is_rowed = rows is not None and layout.shape[1] == self._token_count()
        found = tensor
        if self._is_each(tensor):
            found = self._element(tensor)
            found = self._add("Unsqueeze", [found], tensor.dtype, axes=[0])
        return self._add("Gather", [found, rows], tensor.dtype, axis=1) if is_rowed else found

    def _token_count(self) -> int:
        return self.layouts[self.found.chosen.name].shape[1]

    def _element(self, tensor: gs.Tensor) -> gs.Tensor:
        """The body's expert of a tensor of all experts."""
        for sequence, element in zip(self.sequences, self.elements, strict=True):
            if sequence is tensor:
                return element
        element = gs.Variable(f"{self.name}/expert.{len(self.elements)}", tensor.dtype)
        self.sequences.append(tensor)
        self.elements.append(element)
        return element

    def _add(
        self, op: str, inputs: list[gs.Tensor | None], dtype: Any, **attrs: Any
    ) -> gs.Variable:
        name = f"{self.name}/{op}.{self.count}"
        self.count += 1
        operands = list(inputs)
        if "axes" in attrs:
            operands.append(gs.Constant(f"{name}/axes", np.array(attrs.pop("axes"), np.int64)))
        result = gs.Variable(name, dtype)
        node = gs.Node(op, name, attrs, operands, [result])
        note_origin([node], self.found.total.name)
        self.body.nodes.append(node)
        return result


def _numpy(dtype: Any) -> Any:
    return onnx.helper.tensor_dtype_to_np_dtype(dtype) if isinstance(dtype, int) else dtype
