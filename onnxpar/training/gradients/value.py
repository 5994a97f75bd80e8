"""Arithmetic that builds a graph: each operation on a Value adds a node, and returns the node's
result.

Shapes must be known. An operation without effect (a Reshape to the same shape, a sum over no axes)
adds no node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from onnxpar.graph.shape_inference import infer_results
from onnxpar.graph.tensors import dtype_of
from onnxpar.training.gradients.unknown_shapes import has_shape, shape_error

Array = npt.NDArray[Any]
MANY = 1024
"""The number of elements up to which an `arange` is a constant."""
Step = Callable[[list["Value"], list["Value"]], tuple[Sequence["Value"], Sequence["Value"]]]
"""A function from states and elements of sequences to new states and elements of results, for
`scan`."""


class Builder:
    """Appends nodes to a graph. The names of the nodes and of their results start with `prefix`,
    which no other builder of the graph may use.

    Axes of reductions and similar arguments are operands, as in opset 18 and later.
    """

    def __init__(self, graph: gs.Graph, prefix: str) -> None:
        self.graph = graph
        self.prefix = prefix
        self._names = 0

    def value(self, tensor: gs.Tensor) -> Value:
        """Returns a Value for a tensor of the graph, or of an outer graph."""
        return Value(self, tensor)

    def constant(self, value: Any, dtype: Any = None) -> Value:
        """Returns a new constant."""
        return Value(self, gs.Constant(self.fresh("constant"), np.asarray(value, dtype)))

    def zeros(self, shape: Sequence[int], dtype: Any) -> Value:
        """Returns a tensor of zeros, which a node creates when the graph runs."""
        value = np.zeros(1, dtype)
        return self.add("ConstantOfShape", np.array(shape, np.int64), value=gs.Constant("", value))

    def arange(self, size: int, dtype: Any) -> Value:
        """Returns the numbers from 0 to `size` - 1: a constant or, if there are more than MANY, the
        result of a node."""
        if size <= MANY:
            return self.constant(np.arange(size, dtype=dtype))
        return self.add("Range", *(np.array(n, dtype) for n in (0, size, 1)))

    def add(self, op: str, *operands: Value | Array | None, **attrs: Any) -> Value:
        """Adds a node with one result, and returns the result. An operand may be an array, which
        becomes a constant, or None for a missing operand. `attrs` are the node's attributes."""
        return self.add_each(op, operands, 1, **attrs)[0]

    def add_each(
        self, op: str, operands: Sequence[Value | Array | None], count: int, **attrs: Any
    ) -> list[Value]:
        """Adds a node with `count` results, and returns the results. `operands` and `attrs` are as
        for `add`."""
        tensors = [self._tensor(o) for o in operands]
        name = self.fresh(op)
        results = [gs.Variable(f"{name}:{i}" if count > 1 else name) for i in range(count)]
        node = gs.Node(op, name, attrs, tensors, results)
        shapes = [None if not t.name else t.shape for t in tensors]
        types = infer_results(node, shapes, self.graph.opset)
        for tensor, (dtype, shape) in zip(results, types, strict=True):
            tensor.dtype, tensor.shape = dtype, shape
        self.graph.nodes.append(node)
        return [Value(self, t) for t in results]

    def scan(
        self, step: Step, states: Sequence[Value], sequences: Sequence[Value], backwards: bool
    ) -> tuple[list[Value], list[Value]]:
        """Adds a Scan along the first dimension of sequences, from the end if `backwards`. Returns
        the last states, and the sequences of results.

        `step(states, elements)` returns the new states, and one element for each sequence of
        results; a result element has the same position as the elements from which it was computed.
        Operations on the arguments of `step` add nodes to the Scan's body; tensors of outer graphs
        may only be right operands.
        """
        name = self.fresh("Scan")
        body = gs.Graph(name=name, opset=self.graph.opset)
        inner = Builder(body, name)
        shapes = [*(s.shape for s in states), *(s.shape[1:] for s in sequences)]
        for value, shape in zip((*states, *sequences), shapes, strict=True):
            body.inputs.append(gs.Variable(inner.fresh("given"), value.dtype, list(shape)))
        arguments = [inner.value(t) for t in body.inputs]
        ends, elements = step(arguments[: len(states)], arguments[len(states) :])
        body.outputs = [v.op("Identity").tensor for v in (*ends, *elements)]
        results = [gs.Variable(f"{name}:{i}") for i in range(len(body.outputs))]
        length = sequences[0].shape[0]
        for i, (inside, outside) in enumerate(zip(body.outputs, results, strict=True)):
            outside.dtype = inside.dtype
            outside.shape = inside.shape if i < len(ends) else [length, *inside.shape]
        attrs = {"body": body, "num_scan_inputs": len(sequences)}
        attrs["scan_input_directions"] = [int(backwards)] * len(sequences)
        attrs["scan_output_directions"] = [int(backwards)] * len(elements)
        tensors = [v.tensor for v in (*states, *sequences)]
        self.graph.nodes.append(gs.Node("Scan", name, attrs, tensors, results))
        values = [Value(self, t) for t in results]
        return values[: len(ends)], values[len(ends) :]

    def over_parts(self, number: Value) -> Value:
        """Returns the sum of a scalar over all shards of a parameter: here the scalar itself.
        Builders of manual programs add an AllReduce."""
        return number

    def fresh(self, what: str) -> str:
        """Returns a new name."""
        self._names += 1
        return f"{self.prefix}/{what}.{self._names}"

    def _tensor(self, operand: Value | Array | None) -> gs.Tensor:
        """Returns the tensor of an operand: a constant for an array, and an empty tensor for None
        (an optional operand that is absent)."""
        if operand is None:
            return gs.Variable.empty()
        if isinstance(operand, Value):
            return operand.tensor
        return self.constant(operand).tensor


class Value:
    """A tensor with NumPy's operators. `builder` appends the nodes of operations on it."""

    def __init__(self, builder: Builder, tensor: gs.Tensor) -> None:
        self.builder = builder
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"Value({self.tensor.name}: {self.dtype}{list(self.tensor.shape or '?')})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the tensor. Errors: ModelError if one is unknown."""
        if not has_shape(self.tensor):
            raise shape_error(self.tensor)
        return tuple(int(s) for s in self.tensor.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        dtype = dtype_of(self.tensor)
        assert dtype is not None, self.tensor.name
        return dtype

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def op(self, op: str, *others: Value | Array | float | None, **attrs: Any) -> Value:
        """Adds a node whose first operand is this tensor, and returns its result. Numbers among the
        other operands get this tensor's dtype."""
        operands = [self._like(o) if isinstance(o, (int, float)) else o for o in others]
        return self.builder.add(op, self, *operands, **attrs)

    def _like(self, number: float) -> Value:
        """Returns a number as a constant with this tensor's dtype."""
        return self.builder.constant(number, self.dtype)

    def __add__(self, other: Value | Array | float) -> Value:
        return self.op("Add", other)

    def __sub__(self, other: Value | Array | float) -> Value:
        return self.op("Sub", other)

    def __mul__(self, other: Value | Array | float) -> Value:
        return self if isinstance(other, (int, float)) and other == 1 else self.op("Mul", other)

    def __truediv__(self, other: Value | Array | float) -> Value:
        return self if isinstance(other, (int, float)) and other == 1 else self.op("Div", other)

    def __radd__(self, other: float) -> Value:
        return self._like(other) + self

    def __rsub__(self, other: float) -> Value:
        return self._like(other) - self

    def __rmul__(self, other: float) -> Value:
        return self * other

    def __rtruediv__(self, other: float) -> Value:
        return self._like(other) / self

    def __neg__(self) -> Value:
        return self.op("Neg")

    def __matmul__(self, other: Value) -> Value:
        return self.op("MatMul", other)

    def __pow__(self, other: Value | float) -> Value:
        if isinstance(other, (int, float)) and other == 2:
            return self * self
        return self.op("Pow", other)

    def __lt__(self, other: Value | float) -> Value:
        return self.op("Less", other)

    def __le__(self, other: Value | float) -> Value:
        return self.op("LessOrEqual", other)

    def __gt__(self, other: Value | float) -> Value:
        return self.op("Greater", other)

    def __ge__(self, other: Value | float) -> Value:
        return self.op("GreaterOrEqual", other)

    def equal(self, other: Value | Array | float) -> Value:
        """Returns a tensor of bools, True where elements are equal."""
        return self.op("Equal", other)

    def where(self, yes: Value | float, no: Value | float) -> Value:
        """Returns `yes` where this tensor of bools is true, else `no`. At least one of both must be
        a Value."""
        like = yes if isinstance(yes, Value) else no
        assert isinstance(like, Value)
        yes, no = (v if isinstance(v, Value) else like._like(v) for v in (yes, no))
        return self.op("Where", yes, no)

    def exp(self) -> Value:
        """Returns the exponential."""
        return self.op("Exp")

    def log(self) -> Value:
        """Returns the natural logarithm."""
        return self.op("Log")

    def sqrt(self) -> Value:
        """Returns the square root."""
        return self.op("Sqrt")

    def cast(self, dtype: Any) -> Value:
        """Returns the same numbers in another dtype."""
        dtype = np.dtype(dtype)
        if dtype == self.dtype:
            return self
        return self.op("Cast", to=gs.exporters.onnx_exporter.dtype_to_onnx(dtype))

    def wide(self) -> Value:
        """Returns 16-bit floats as float32, other dtypes unchanged."""
        return self.cast(np.float32) if self.dtype.itemsize < 4 else self

    def sum(self, axes: Sequence[int] | None = None, keepdims: bool = False) -> Value:
        """Returns the sum over axes, by default over all. With `keepdims`, summed dimensions stay,
        with size 1."""
        return self._reduce("ReduceSum", axes, keepdims)

    def mean(self, axes: Sequence[int] | None = None, keepdims: bool = False) -> Value:
        """Returns the mean over axes, by default over all. With `keepdims`, averaged dimensions
        stay, with size 1."""
        return self._reduce("ReduceMean", axes, keepdims)

    def _reduce(self, op: str, axes: Sequence[int] | None, keepdims: bool) -> Value:
        axes = range(self.rank) if axes is None else [a % self.rank for a in axes]
        if not axes:
            return self
        shape = self.shape
        if op == "ReduceSum" and all(shape[a] == 1 for a in axes):
            sizes = [
                1 if a in axes else s for a, s in enumerate(shape) if keepdims or a not in axes
            ]
            return self.reshape(sizes)
        return self.op(op, np.array(axes, np.int64), keepdims=int(keepdims))

    def reshape(self, shape: Sequence[int]) -> Value:
        """Returns the same elements in another shape; one size may be -1."""
        sizes = [int(s) for s in shape]
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.size // -int(np.prod(sizes, dtype=np.int64))
        if tuple(sizes) == self.shape:
            return self
        return self.op("Reshape", np.array(sizes, np.int64), allowzero=1)

    def expand(self, shape: Sequence[int]) -> Value:
        """Returns the tensor, broadcast to a shape."""
        if tuple(shape) == self.shape:
            return self
        return self.op("Expand", np.array(shape, np.int64))

    def transpose(self, perm: Sequence[int]) -> Value:
        """Returns the tensor with its dimensions in the order `perm`."""
        perm = [int(p) for p in perm]
        return self if perm == sorted(perm) else self.op("Transpose", perm=perm)

    def swap(self, a: int = -1, b: int = -2) -> Value:
        """Returns the tensor with two dimensions exchanged, by default the last two."""
        perm = list(range(self.rank))
        perm[a], perm[b] = perm[b], perm[a]
        return self.transpose(perm)

    def unsqueeze(self, axes: Sequence[int]) -> Value:
        """Returns the tensor with dimensions of size 1 inserted at these axes of the result."""
        rank = self.rank + len(axes)
        axes = sorted(a % rank for a in axes)
        shape = list(self.shape)
        for axis in axes:
            shape.insert(axis, 1)
        return self if not axes else self.op("Unsqueeze", np.array(axes, np.int64))

    def slice(self, start: int, stop: int, axis: int) -> Value:
        """Returns the elements from `start` to before `stop` along a dimension."""
        axis %= self.rank
        if (start, stop) == (0, self.shape[axis]):
            return self
        bounds = [np.array([n], np.int64) for n in (start, stop, axis)]
        return self.op("Slice", *bounds)

    def pad(self, before: Sequence[int], after: Sequence[int]) -> Value:
        """Returns the tensor with zeros added before and after each dimension; negative numbers
        remove elements."""
        if not any(before) and not any(after):
            return self
        return self.op("Pad", np.array([*before, *after], np.int64))

    def sum_to(self, shape: Sequence[int]) -> Value:
        """Returns the sum over the dimensions in which broadcasting a tensor of this shape would
        expand it, in this shape: [2, 3, 4] summed to [3, 1] adds up the first and the last
        dimension."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        lead = self.rank - len(shape)
        wide = [lead + i for i, s in enumerate(shape) if s == 1 and self.shape[lead + i] != 1]
        return self.sum([*range(lead), *wide], keepdims=True).reshape(shape)
