"""The computation of an expert on the rows of its tokens, as a list of steps that compute each row
by itself.

The steps are recorded from one expert's nodes, in whatever form an exporter wrote them, and are
written again for all experts together, with the expert as first dimension.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import constant, given, tensor_shape
from onnxpar.load.shape_values import given_integers, integers, known_integers

UNARY = frozenset(
    [
        "Abs",
        "Cast",
        "Celu",
        "Clip",
        "Elu",
        "Erf",
        "Exp",
        "Floor",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "LeakyRelu",
        "Log",
        "Mish",
        "Neg",
        "QuickGelu",
        "Reciprocal",
        "Relu",
        "Selu",
        "Sigmoid",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Swish",
        "Tanh",
    ]
)
"""Elementwise ops of one operand; the further operands of Clip are numbers."""
BINARY = frozenset(["Add", "Sub", "Mul", "Div", "Pow", "Min", "Max"])
"""Elementwise ops of two operands."""
_REDUCTIONS = frozenset(["ReduceMean", "ReduceSum", "ReduceMax"])
_MOVES = frozenset(["Reshape", "Squeeze", "Unsqueeze", "Transpose", "Flatten", "Expand"])
CUT = "cut"
"""The step that takes columns start, start + step, ... of its operand."""


@dataclass(frozen=True)
class Row:
    """An operand: the result of step `number`, or the expert's input for 0."""

    number: int


@dataclass(frozen=True, eq=False)
class Own:
    """An operand: a constant of one expert, a matrix or a vector with an element per column."""

    tensor: gs.Constant


@dataclass(frozen=True, eq=False)
class Stacked:
    """An operand: an expert's slice of a tensor whose first dimension is the expert. `flipped`: the
    slice is a matrix that is read transposed."""

    tensor: gs.Tensor
    flipped: bool = False


@dataclass(frozen=True, eq=False)
class Shared:
    """An operand that all experts read: a number, a vector with an element per column, or a
    matrix."""

    tensor: gs.Tensor


@dataclass(frozen=True, eq=False)
class Beside:
    """An operand that no step computes, with a row for each row of the expert's input."""

    tensor: gs.Tensor


Operand = Row | Own | Stacked | Shared | Beside


@dataclass(frozen=True)
class RowStep:
    """An op that computes each row by itself.

    op        the ONNX op, or CUT
    operands  its operands, in order
    attrs     its attributes
    width     the number of columns of its result
    dtype     the type of its result
    domain    the op's domain, empty for ONNX
    """

    op: str
    operands: tuple[Operand, ...]
    attrs: dict[str, Any]
    width: int
    dtype: Any
    domain: str = ""


@dataclass(frozen=True)
class Rows:
    """A tensor in an expert's nodes: the result of step `number`, where 0 is the expert's input.
    `labels` names its dimensions: "R1f" has rows, a single element, and columns (features)."""

    number: int
    labels: str


@dataclass
class RowProgram:
    """The steps of one expert, recorded from its nodes.

    width  the columns of the input
    dtype  the type of the input
    steps  the steps so far
    found  the tensors that hold rows, by id
    made   the result of each step, with the labels of its dimensions
    """

    width: int
    dtype: Any
    steps: list[RowStep] = field(default_factory=list)
    found: dict[int, Rows] = field(default_factory=dict)
    made: list[tuple[gs.Tensor, str]] = field(default_factory=list)

    def width_of(self, rows: Rows) -> int:
        """Returns the number of columns of rows."""
        return self.width if rows.number == 0 else self.steps[rows.number - 1].width

    def enter(self, tensor: gs.Tensor, labels: str) -> None:
        """Records that a tensor with these labels is the expert's input."""
        self.found[id(tensor)] = Rows(0, labels)

    def rows(self, tensor: gs.Tensor) -> Rows | None:
        """Returns what step computes a tensor, with the labels of its dimensions; None if no step
        does."""
        return self.found.get(id(tensor))

    def operand(self, tensor: gs.Tensor) -> Own | Stacked | Shared | Beside | None:
        """Returns the operand of a step for a tensor that no step computes; None if the tensor
        cannot be an operand. A subclass overrides this where the weights of experts are not
        separate constants."""
        return Own(tensor) if isinstance(tensor, gs.Constant) else None

    def follow(self, node: gs.Node) -> bool:
        """Records a node that reads rows as a step. Returns False if the node does not compute each
        row by itself."""
        if node.domain not in (None, "", "ai.onnx") and node.op != "QuickGelu":
            return False
        reads = [self.rows(t) for t in node.inputs]
        main = reads[0] if reads else None
        if node.op in ("MatMul", "Gemm"):
            return self._product(node, reads)
        if node.op in BINARY and len(node.inputs) == 2:
            return self._binary(node, reads)
        if main is None or any(reads[1:]) != (node.op == "Concat" and len(reads) > 1):
            return False
        if node.op in UNARY:
            return self._unary(node, main)
        if node.op in _MOVES:
            labels = _moved(node, main, self.width_of(main))
            if labels is not None:
                self.found[id(node.outputs[0])] = Rows(main.number, labels)
            return labels is not None
        if node.op in ("Slice", "Split", "Gather"):
            return self._cut(node, main)
        if node.op in (*_REDUCTIONS, "Softmax"):
            return self._reduction(node, main)
        return False

    def _row(self, rows: Rows) -> Row:
        return Row(rows.number)

    def _add(
        self, node: gs.Node, labels: str, step: tuple[str, tuple[Operand, ...]], width: int,
        attrs: dict[str, Any] | None = None, output: int = 0, last: bool = True,
    ) -> Rows:  # fmt: skip
        """Appends a step, and returns the rows that it makes.

        node    the node from which the step is recorded
        labels  of the dimensions of the result
        step    the op and its operands
        width   the columns of the result
        output  which result of the node is meant
        last    True if the step gives the node's result; False if another step follows for this
                node
        """
        result = node.outputs[output]
        domain = node.domain or ""
        self.steps.append(RowStep(*step, attrs or {}, width, result.dtype, domain))
        self.made.append((result, labels))
        rows = Rows(len(self.steps), labels)
        if last:
            self.found[id(result)] = rows
        return rows

    def _unary(self, node: gs.Node, x: Rows) -> bool:
        """Records an elementwise op of `x`; further operands, as of Clip, must be constants."""
        numbers = [t for t in node.inputs[1:]]
        if any(t.name and not isinstance(t, gs.Constant) for t in numbers):
            return False
        attrs = {k: v for k, v in node.attrs.items() if not k.startswith("onnxpar.")}
        operands: tuple[Operand, ...] = (Row(x.number), *(Shared(t) for t in numbers))
        self._add(node, x.labels, (node.op, operands), self.width_of(x), attrs)
        return True

    def _binary(self, node: gs.Node, reads: list[Rows | None]) -> bool:
        """Records an elementwise op of two operands. `reads` has the rows of each operand, or
        None."""
        known = [r for r in reads if r is not None]
        labels = known[0].labels
        operands: list[Operand] = []
        widths = [self.width_of(r) for r in known]
        for tensor, rows in zip(node.inputs, reads, strict=True):
            if rows is not None:
                if rows.labels != labels:
                    return False
                operands.append(Row(rows.number))
                continue
            other = self._addend(tensor, labels, widths[0])
            if other is None:
                return False
            operands.append(other[0])
            widths.append(other[1])
        if len(set(widths) - {1}) > 1:
            return False
        self._add(node, labels, (node.op, tuple(operands)), max(widths))
        return True

    def _addend(
        self, tensor: gs.Tensor, labels: str, width: int
    ) -> tuple[Own | Stacked | Shared | Beside, int] | None:
        """Returns the operand for a tensor that no step computes, and the operand's number of
        columns; None if the tensor cannot be an operand. The other operand of the elementwise op is
        rows of these `labels` and this `width`."""
        value = constant(tensor) if _is_number(tensor) else None
        if value is not None:
            return (Shared(tensor), 1) if value.ndim <= 1 else None
        operand = self.operand(tensor)
        shape = tensor_shape(tensor) or ()
        if isinstance(operand, (Stacked, Beside)):
            is_vector = isinstance(operand, Stacked) and len(shape) == 1 and labels.endswith("f")
            columns = shape[labels.index("f")] if len(shape) == len(labels) else None
            columns = shape[0] if is_vector else columns
            return None if columns is None else (operand, columns)
        if operand is None or not labels.endswith("f") or None in shape:
            return None
        if any(size != 1 for size in shape[:-1]) or len(shape) > len(labels):
            return None
        return operand, shape[-1] or 0

    def _product(self, node: gs.Node, reads: list[Rows | None]) -> bool:
        """Records a MatMul or Gemm of rows and an expert's matrix. `reads` has the rows of each
        operand, or None."""
        at = 0 if reads[0] is not None else 1
        x, tensor = reads[at], node.inputs[1 - at]
        if x is None or reads[1 - at] is not None:
            return False
        weight = self.operand(tensor)
        if weight is None or isinstance(weight, Beside):
            return False
        if node.op == "Gemm":
            return self._gemm(node, x, weight)
        shape = tensor_shape(tensor) or ()
        if at == 1:  # the expert's matrix comes first, so that the rows' columns are last but one
            columns = shape[-2] if shape else None
            if x.labels != "Rf1" or not isinstance(weight, Stacked) or columns is None:
                return False
            weight = Stacked(weight.tensor, not weight.flipped)
        else:
            columns = shape[-1] if shape else None
            by_row = len(shape) == len(x.labels) and x.labels == "R1f"
            in_common = len(shape) == 2 and x.labels.lstrip("1") == "Rf"
            if columns is None or not (by_row or in_common):
                return False
        self._add(node, x.labels, ("MatMul", (Row(x.number), weight)), columns)
        return True

    def _gemm(self, node: gs.Node, x: Rows, weight: Own | Stacked | Shared) -> bool:
        """Records a Gemm of the rows `x` and a matrix, as a product and, if there is a bias, an
        addition."""
        scaled = node.attrs.get("alpha", 1.0) != 1.0 or node.attrs.get("beta", 1.0) != 1.0
        shape = tensor_shape(node.inputs[1]) or ()
        if scaled or node.attrs.get("transA") or x.labels != "Rf" or len(shape) != 2:
            return False
        flipped = bool(node.attrs.get("transB"))
        columns = shape[0 if flipped else 1]
        bias = given(node, 2)
        if columns is None:
            return False
        addend = self._addend(bias, x.labels, columns) if bias is not None else None
        if bias is not None and addend is None:
            return False
        attrs = {"flipped": flipped} if flipped else {}
        step = ("MatMul", (Row(x.number), weight))
        product = self._add(node, x.labels, step, columns, attrs, last=addend is None)
        if addend is not None:
            self._add(node, x.labels, ("Add", (Row(product.number), addend[0])), columns)
        return True

    def _cut(self, node: gs.Node, x: Rows) -> bool:
        """Records a Slice, a Split, or a Gather of constant columns of `x` as steps that take some
        of its columns. Returns False for any other."""
        width, rank = self.width_of(x), len(x.labels)
        at = x.labels.index("f")
        for output, bounds in enumerate(_cuts(node, width, rank, at) or ()):
            count = len(range(width)[slice(*bounds)])
            attrs = dict(zip(("start", "stop", "step"), bounds, strict=True))
            self._add(node, x.labels, (CUT, (Row(x.number),)), count, attrs, output)
            if output == len(node.outputs) - 1:
                return True
        return False

    def _reduction(self, node: gs.Node, x: Rows) -> bool:
        """Records a reduction or Softmax over the columns of `x`."""
        rank, at = len(x.labels), x.labels.index("f")
        if node.op == "Softmax":
            axes: list[int] | None = [node.attrs.get("axis", -1)]
        else:
            axes = given_integers(node, 1)
        if axes is None or [a % rank for a in axes] != [at] or not node.attrs.get("keepdims", 1):
            return False
        width = self.width_of(x) if node.op == "Softmax" else 1
        self._add(node, x.labels, (node.op, (Row(x.number),)), width)
        return True


def _is_number(tensor: gs.Tensor) -> bool:
    """True for a constant of one element."""
    shape = tensor_shape(tensor)
    return isinstance(tensor, gs.Constant) and shape is not None and set(shape) <= {1}


def _cuts(node: gs.Node, width: int, rank: int, at: int) -> list[tuple[int, int, int]] | None:
    """Returns (start, stop, step) of the columns of each result of a Slice, Split or Gather along
    dimension `at` of `rank`, which has `width` columns. None for columns at irregular distances, or
    along another dimension."""
    if node.op == "Slice":
        fields = [given_integers(node, i) for i in (1, 2)]
        axes = given_integers(node, 3)
        steps = given_integers(node, 4) or [1]
        if None in fields or axes is None or len(axes) != 1 or axes[0] % rank != at:
            return None
        start, stop = ((f or [0])[0] for f in fields)
        columns = range(width)[slice(start, stop, steps[0])]
        return [(columns.start, columns.stop, columns.step)] if steps[0] > 0 else None
    if node.attrs.get("axis", 0) % rank != at:
        return None
    if node.op == "Split":
        sizes = given_integers(node, 1)
        if sizes is None:
            part = -(-width // len(node.outputs))
            sizes = [min(part, width - part * i) for i in range(len(node.outputs))]
        ends = np.cumsum([0, *sizes]).tolist()
        return [(a, b, 1) for a, b in itertools.pairwise(ends)]
    picked = integers(node.inputs[1])
    if not picked or len(tensor_shape(node.inputs[1]) or ()) != 1:
        return None
    step = picked[1] - picked[0] if len(picked) > 1 else 1
    regular = range(picked[0], picked[0] + step * len(picked), step or 1)
    return [(picked[0], picked[-1] + 1, step)] if step > 0 and [*regular] == picked else None


def _moved(node: gs.Node, x: Rows, width: int) -> str | None:
    """Returns the labels of the result of a node that only adds, removes or moves dimensions of one
    element (Reshape, Transpose ...); None if it does more. `width` is the number of columns of
    `x`."""
    shape = tensor_shape(node.outputs[0])
    before = tensor_shape(node.inputs[0])
    if node.op == "Transpose":
        order = node.attrs.get("perm") or range(len(x.labels))[::-1]
        return "".join(x.labels[i] for i in order)
    if node.op == "Expand":
        sizes = node.inputs[1] if len(node.inputs) > 1 else None
        return x.labels if sizes is not None and _expands_nothing(sizes, x, width) else None
    if shape is None or before is None:
        return None
    pending = [(label, before[i]) for i, label in enumerate(x.labels) if label != "1"]
    labels = ""
    for size in shape:
        if pending and size == pending[0][1]:
            labels += pending.pop(0)[0]
        elif size == 1:
            labels += "1"
        else:
            return None
    return labels if not pending else None


def _expands_nothing(sizes: gs.Tensor, x: Rows, width: int) -> bool:
    """True if an Expand to `sizes` leaves `x`, with `width` columns, as it is."""
    known = known_integers(sizes)
    if known is None or known.size > len(x.labels):
        return False
    wanted = known.reshape(-1).tolist()
    labels = x.labels[len(x.labels) - len(wanted) :]
    fits = {"f": (1, width), "1": (1,), "R": (1,)}
    return all(size in fits[label] for size, label in zip(wanted, labels, strict=True))
