"""Writes a mixture of experts in dense form: the expert is the first dimension of all its tensors.

Every expert gets the rows of its tokens, and zeros for the tokens of other experts:

    x:  [expert, token, column] = Where(chosen, tokens, 0)
    ... the steps of an expert, with weights [expert, ...]
    y:  [token, column] = ReduceSum(Where(chosen, weighted, 0), axis 0)

So rules, presets and the search split experts, tokens and columns like any other dimension. The
pass compact-experts later removes the rows of zeros from what a rank computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto, numpy_helper

from onnxpar.graph.lazy_values import ExternalValues, StackedValues, stored_proto
from onnxpar.graph.stored import element_bits
from onnxpar.graph.subgraphs import drop_unread
from onnxpar.graph.tensors import numpy_dtype, tensor_shape
from onnxpar.graph.used_names import names_of
from onnxpar.load.row_program import (
    CUT,
    Beside,
    Operand,
    Own,
    Row,
    RowProgram,
    RowStep,
    Shared,
    Stacked,
)


class DenseExperts:
    """Makes the nodes of one mixture of experts in dense form. They are kept in `made`, and `put`
    inserts them into the graph.

    name     a prefix of the names of nodes
    experts  the number of experts
    tokens   the number of tokens; None if it is open
    """

    def __init__(self, graph: gs.Graph, name: str, experts: int, tokens: int | None) -> None:
        self.graph, self.name = graph, names_of(graph).root(name, "/")
        self.experts, self.tokens = experts, tokens
        self.made: list[gs.Node] = []

    def add(
        self, op: str, inputs: Sequence[Any], dtype: Any, shape: Sequence[Any], **attrs: Any
    ) -> gs.Variable:
        """Makes a node, and returns its result, of this dtype and shape. Operands that are arrays
        become constants; `attrs` are the node's attributes."""
        name = f"{self.name}/{op}.{len(self.made)}"
        operands = [
            t if isinstance(t, gs.Tensor) else _stored(f"{name}/{i}", np.asarray(t))
            for i, t in enumerate(inputs)
        ]
        result = gs.Variable(name, dtype, list(shape))
        self.made.append(gs.Node(op, name, attrs, operands, [result]))
        return result

    def reduce(self, op: str, x: gs.Tensor, axis: int, keep: bool) -> gs.Variable:
        """Makes a reduction over dimension `axis`, and returns its result; with `keep`, the
        dimension stays, with size 1."""
        shape = list(x.shape)
        shape[axis : axis + 1] = [1] if keep else []
        return self.add(op, [x, np.array([axis])], x.dtype, shape, keepdims=int(keep))

    def write(
        self, steps: Sequence[RowStep], tokens: gs.Tensor, chosen: gs.Tensor,
        weights: gs.Tensor | None = None,
    ) -> gs.Variable:  # fmt: skip
        """Makes the nodes of a mixture of experts; returns the sum of the experts' results, [token,
        column].

        steps    the steps of each expert, with the weights of all experts stacked
        tokens   the rows, [token, column]
        chosen   True where an expert gets a token, [expert, token, 1]
        weights  factors of the experts' results, [expert, token, 1]; None: 1
        """
        zero = np.zeros((), numpy_dtype(tokens))
        x = self._rows("Where", [chosen, tokens, zero], tokens.dtype, tokens.shape[-1])
        results: list[gs.Tensor] = [x]
        for step in steps:
            results.append(self._step(step, results))
        y = results[-1]
        if weights is not None:
            if weights.dtype != y.dtype:
                cast = _onnx_dtype(y)
                weights = self.add("Cast", [weights], y.dtype, weights.shape, to=cast)
            y = self._rows("Mul", [y, weights], y.dtype, y.shape[-1])
        zero = np.zeros((), numpy_dtype(y))
        return self.reduce(
            "ReduceSum", self._rows("Where", [chosen, y, zero], y.dtype, y.shape[-1]), 0, False
        )

    def _rows(self, op: str, operands: Sequence[Any], dtype: Any, width: int, **attrs: Any) -> Any:
        """Makes a node, and returns its result of shape [expert, token, width]."""
        return self.add(op, operands, dtype, [self.experts, self.tokens, width], **attrs)

    def _step(self, step: RowStep, results: Sequence[gs.Tensor]) -> gs.Tensor:
        """Makes the nodes of one step for all experts, and returns its result. `results` are the
        results of the steps before; the first is the experts' input."""
        attrs = dict(step.attrs)
        if step.op == CUT:
            (x,) = (results[o.number] for o in step.operands if isinstance(o, Row))
            bounds = [np.array([attrs[k]], np.int64) for k in ("start", "stop")]
            pace = [np.array([2], np.int64), np.array([attrs["step"]], np.int64)]
            return self._rows("Slice", [x, *bounds, *pace], step.dtype, step.width)
        if step.op == "MatMul":
            x = next(results[o.number] for o in step.operands if isinstance(o, Row))
            flipped = bool(attrs.get("flipped"))
            return self._rows("MatMul", [x, self._matrix(step, flipped)], step.dtype, step.width)
        operands = [self._operand(o, results) for o in step.operands]
        if step.op in ("ReduceMean", "ReduceSum", "ReduceMax"):
            return self._rows(step.op, [*operands, np.array([2])], step.dtype, 1, keepdims=1)
        if step.op == "Softmax":
            attrs = {"axis": 2}
        result = self._rows(step.op, operands, step.dtype, step.width, **attrs)
        self.made[-1].domain = step.domain or None
        return result

    def _matrix(self, step: RowStep, flipped: bool) -> gs.Tensor:
        """Returns the matrices of a step that is a matrix product, [expert, row, column], or [row,
        column] if all experts share one. `flipped` transposes them."""
        (operand,) = (o for o in step.operands if not isinstance(o, Row))
        assert isinstance(operand, (Stacked, Shared))
        flipped ^= isinstance(operand, Stacked) and operand.flipped
        weight = operand.tensor
        if not flipped:
            return weight
        *lead, rows, columns = tensor_shape(weight) or ()
        perm = [0, 2, 1] if lead else [1, 0]
        return self.add("Transpose", [weight], weight.dtype, [*lead, columns, rows], perm=perm)

    def _operand(self, operand: Operand, results: Sequence[gs.Tensor]) -> gs.Tensor:
        """Returns the tensor of an operand of a step, in a shape that broadcasts with [expert,
        token, column]."""
        if isinstance(operand, Row):
            return results[operand.number]
        tensor = operand.tensor
        shape = tensor_shape(tensor) or ()
        if isinstance(operand, Stacked) and len(shape) == 2:  # a vector for each expert
            to, at = [shape[0], 1, shape[1]], [1]
        elif isinstance(operand, Beside):
            to, at = [1, *shape], [0]
        else:
            return tensor
        return self.add("Unsqueeze", [tensor, np.array(at, np.int64)], tensor.dtype, to)


def _stored(name: str, value: np.ndarray[Any, Any]) -> gs.Constant:
    """Returns a constant whose value is read only when needed, like the weights of the model's
    file."""
    return gs.Constant(name, gs.ir.tensor.LazyValues(numpy_helper.from_array(value, name)))


def _onnx_dtype(tensor: gs.Tensor) -> int:
    code: int = gs.exporters.onnx_exporter.dtype_to_onnx(tensor.dtype)
    return code


def merged(programs: Sequence[RowProgram], folder: Path, name: str) -> list[RowStep] | None:
    """Returns the steps of all experts as one program; None if the experts do not compute the same
    steps. Constants that differ by expert are stacked: 8 weights [64, 32] become one [8, 64, 32].

    programs  the steps of each expert
    folder    the folder of external data
    name      a prefix of the names of stacked constants
    """
    first = programs[0].steps
    if any(len(p.steps) != len(first) or p.width != programs[0].width for p in programs):
        return None
    joined = []
    for at, steps in enumerate(zip(*(p.steps for p in programs), strict=True)):
        like = steps[0]
        facts = [(s.op, s.attrs, s.width, str(s.dtype), s.domain, len(s.operands)) for s in steps]
        if any(f != facts[0] for f in facts):
            return None
        operands = []
        for i, each in enumerate(zip(*(s.operands for s in steps), strict=True)):
            operand = _joined(each, folder, f"{name}/weight.{at}.{i}")
            if operand is None:
                return None
            operands.append(operand)
        joined.append(
            RowStep(like.op, tuple(operands), like.attrs, like.width, like.dtype, like.domain)
        )
    return joined


def _joined(each: Sequence[Operand], folder: Path, name: str) -> Operand | None:
    """Returns one operand for all experts, from the operands that they have in one place of a step:
    equal ones are shared, each expert's own constants are stacked, in a constant called `name`.
    None if they cannot be joined."""
    first = each[0]
    if any(type(o) is not type(first) for o in each):
        return None
    if isinstance(first, Row):
        return first if all(o == first for o in each) else None
    tensors: list[gs.Tensor] = [o.tensor for o in each if not isinstance(o, Row)]
    if isinstance(first, Stacked):
        flips = {o.flipped for o in each if isinstance(o, Stacked)}
        return first if len({id(t) for t in tensors}) == len(flips) == 1 else None
    if len({id(t) for t in tensors}) == 1 and not isinstance(first, Own):
        return first
    if len({id(getattr(t, "_values", t)) for t in tensors}) == 1:
        return Shared(tensors[0])
    if isinstance(first, Beside):
        return None
    if isinstance(first, Shared):
        if not all(isinstance(t, gs.Constant) for t in tensors):
            return first if not any(t.name for t in tensors) else None
        values = [np.asarray(t.values) for t in tensors]
        return first if all(np.array_equal(v, values[0]) for v in values) else None
    stack = _stack(tensors, folder, name)
    return None if stack is None else Stacked(stack)


def _stack(tensors: Sequence[gs.Constant], folder: Path, name: str) -> gs.Constant | None:
    """Returns a constant called `name` that stacks others, as vectors or matrices; None if their
    types differ. The values are not read."""
    protos = [stored_proto(t) or numpy_helper.from_array(t.values, t.name) for t in tensors]
    kinds = {(tuple(p.dims), p.data_type) for p in protos}
    if len(kinds) > 1 or element_bits(protos[0].data_type) < 8:
        return None
    dims = [*protos[0].dims]
    while len(dims) > 1 and dims[0] == 1:  # vectors that are stored as [1, column]
        dims = dims[1:]
    parts = []
    for proto, tensor in zip(protos, tensors, strict=True):
        part = TensorProto()
        part.CopyFrom(proto)
        part.name = tensor.name
        del part.dims[:]
        part.dims.extend(dims)
        parts.append(part)
    values = [t._values for t in tensors if isinstance(t._values, ExternalValues)]
    source = values[0].folder if values else folder
    return gs.Constant(name, StackedValues(name, parts, source, tensors))


def put(
    graph: gs.Graph,
    nodes: list[gs.Node],
    old: gs.Tensor,
    new: gs.Variable,
    order: Mapping[int, int],
) -> None:
    """Inserts `nodes` into the graph, where all their operands are computed, so that the result of
    the last, `new`, replaces the tensor `old` under its name. Removes nodes that nothing reads
    then.

    order  the places of the graph's nodes, by id()
    """
    node = old.inputs[0]
    last = max(order.get(id(n), -1) for m in nodes for t in m.inputs for n in t.inputs)
    last = max(last, order[id(node)])
    at = next(i for i, n in enumerate(graph.nodes) if order.get(id(n)) == last)
    graph.nodes[at + 1 : at + 1] = nodes
    place = next(i for i, t in enumerate(node.outputs) if t is old)
    maker = new.inputs[0]
    unread = names_of(graph).free(f"{old.name}::unread")
    node.outputs[place] = gs.Variable(unread, old.dtype, old.shape)
    maker.outputs[0] = old
    drop_unread(graph)
