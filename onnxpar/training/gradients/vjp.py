"""Gradient rules: functions that compute the gradients of a node's operands from the gradients of
its results. They are registered by op, like sharding rules.

    @vjp("Mul")
    def mul(v: Vjp) -> Grads:
        a, b = v.operands
        return v.dy * b, v.dy * a

A rule returns a gradient per operand, None for an operand without a gradient (indices, shapes);
trailing Nones may be left out. A rule need not sum over dimensions that were broadcast, nor check
which gradients are wanted: the caller sums, and drops unused nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import captured
from onnxpar.graph.tensors import constant, is_float
from onnxpar.training.gradients.value import Array, Builder, Value

Grads = Sequence[Value | None]
"""A gradient for each operand; None for an operand without."""
VjpFunction = Callable[["Vjp"], Grads]


@dataclass
class Vjp:
    """The argument of a gradient rule (vector-Jacobian product): a node of the forward graph, and
    the gradients of its results.

    builder  appends nodes to the graph
    dys      gradient of each result; None if the loss does not depend on it
    wanted   for each operand, True if its gradient is used
    """

    node: gs.Node
    builder: Builder
    dys: Sequence[Value | None]
    wanted: Sequence[bool]

    @property
    def operands(self) -> list[Value]:
        """The operands, followed by the tensors of outer graphs that the node's subgraphs read. A
        missing operand has an empty name and no shape."""
        return [self.builder.value(t) for t in operands_of(self.node)]

    def operand(self, index: int) -> Value | None:
        """Returns an operand; None if it is missing."""
        tensors = self.node.inputs
        exists = index < len(tensors) and bool(tensors[index].name)
        return self.builder.value(tensors[index]) if exists else None

    @property
    def x(self) -> Value:
        """The first operand."""
        return self.builder.value(self.node.inputs[0])

    @property
    def y(self) -> Value:
        """The first result."""
        return self.builder.value(self.node.outputs[0])

    @property
    def dy(self) -> Value:
        """The gradient of the first result; zeros if the loss does not depend on it."""
        return self.gradient(0)

    def gradient(self, output: int) -> Value:
        """Returns the gradient of a result; zeros if the loss does not depend on it."""
        dy = self.dys[output]
        if dy is None:
            y = self.builder.value(self.node.outputs[output])
            return self.builder.zeros(y.shape, y.dtype)
        return dy

    def output(self, index: int, dtype: Any, shape: Sequence[int]) -> Value:
        """Returns a result of the node. If the node does not return it yet, adds it with this dtype
        and shape."""
        outputs = self.node.outputs
        while len(outputs) <= index:
            outputs.append(gs.Variable.empty())
        if not outputs[index].name:
            outputs[index] = gs.Variable(self.builder.fresh(f"result{index}"), dtype, list(shape))
        return self.builder.value(outputs[index])

    def constant(self, index: int) -> Array | None:
        """Returns the value of a constant operand; None if the operand is not constant, or
        missing."""
        exists = index < len(self.node.inputs) and self.node.inputs[index].name
        return constant(self.node.inputs[index]) if exists else None

    def attr(self, name: str) -> Any:
        """Returns an attribute of the node, or else ONNX's default; None if there is no default."""
        if name in self.node.attrs:
            return self.node.attrs[name]
        schema = onnx.defs.get_schema(
            self.node.op, self.builder.graph.opset, self.node.domain or ""
        )
        default = schema.attributes[name].default_value
        if default.type == onnx.AttributeProto.UNDEFINED:
            return None
        value = onnx.helper.get_attribute_value(default)
        return value.decode() if isinstance(value, bytes) else value


def operands_of(node: gs.Node) -> list[gs.Tensor]:
    """Returns the tensors that a node reads: its operands, followed by the tensors of outer graphs
    that its subgraphs read, each once."""
    inner = {t.name: t for t, _, _ in captured(node)}
    return [*node.inputs, *inner.values()]


@dataclass(frozen=True)
class Entry:
    """A registered gradient rule.

    function  the rule
    trained   indices of the operands that are usually parameters
    message   True for Send and Recv
    """

    function: VjpFunction
    trained: Sequence[int] = field(default=())
    message: bool = False


_RULES: dict[tuple[str, str], Entry] = {}
_NONE: dict[tuple[str, str], str] = {}
_CARRIERS: set[tuple[str, str]] = set()


def vjp(
    *ops: str, domain: str = "", trained: Sequence[int] = (), message: bool = False
) -> Callable[[VjpFunction], VjpFunction]:
    """Returns a decorator that registers a gradient rule for one op or for several ops.

    trained  indices of the operands that are usually a weight, bias, scale or table
    message  True for Send and Recv: if one such node may carry a gradient, the rules of all such
             nodes run, and the added nodes are kept, because every Send needs its Recv
    """

    def register(function: VjpFunction) -> VjpFunction:
        for op in " ".join(ops).split():
            assert (domain, op) not in _RULES, f"two gradients for {op}"
            _RULES[domain, op] = Entry(function, trained, message)
        return function

    return register


def no_gradient(ops: str, reason: str, domain: str = "", carries: bool = False) -> None:
    """Registers the reason why ops have no gradient: `no_gradient("Unique", "...")`. Such an op on
    a path from a parameter to the loss is an error.

    carries  True if results that are not floating-point tensors are part of such a path, too: they
             carry floating-point numbers, rounded or in a sequence
    """
    for op in ops.split():
        assert (domain, op) not in _NONE, f"two reasons for {op}"
        _NONE[domain, op] = reason
        if carries:
            _CARRIERS.add((domain, op))


def registered() -> Mapping[tuple[str, str], Entry]:
    """Returns all gradient rules by (domain, op)."""
    return _RULES


def without() -> Mapping[tuple[str, str], str]:
    """Returns the reasons why ops have no gradient, by (domain, op)."""
    return _NONE


def entry_of(node: gs.Node) -> Entry | None:
    """Returns the gradient rule of a node's op; None if there is none."""
    return _RULES.get(("" if node.domain in (None, "ai.onnx") else node.domain, node.op))


def is_message(node: gs.Node) -> bool:
    """True if a node is a Send or Recv."""
    entry = entry_of(node)
    return entry is not None and entry.message


def carries(node: gs.Node) -> bool:
    """True if a node's results may carry numbers that need a gradient, although the results are not
    floating-point tensors (rounded numbers, sequences)."""
    return (node.domain or "", node.op) in _CARRIERS


def is_trainable_type(tensor: gs.Tensor) -> bool:
    """True if a tensor can have a gradient: it is not missing, and has floating-point numbers."""
    return bool(tensor.name) and is_float(tensor)
