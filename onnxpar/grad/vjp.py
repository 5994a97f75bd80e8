"""What a gradient rule is: a function from the gradients of a node's results to those of its
operands, registered by op as sharding rules are.

    @vjp("Mul")
    def mul(v: Vjp) -> Grads:
        a, b = v.operands
        return v.dy * b, v.dy * a

A rule returns a gradient per operand, None where there is none (indices, shapes); those that are
left out at the end have none. What was broadcast is summed behind the rule, and what nobody wants
is dropped again, so rules ask for neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from onnxpar.grad.value import Array, Builder, Value
from onnxpar.ir.subgraphs import captured
from onnxpar.ir.tensors import constant, is_float

Grads = Sequence[Value | None]
VjpFunction = Callable[["Vjp"], Grads]


@dataclass
class Vjp:
    """A node of the forward graph, and the gradients that have reached its results.

    dys     by result, None where no gradient does; `dy` is that of the first
    wanted  by operand, whether anything is done with its gradient
    """

    node: gs.Node
    builder: Builder
    dys: Sequence[Value | None]
    wanted: Sequence[bool]

    @property
    def operands(self) -> list[Value]:
        """The operands as they were read, and behind them what subgraphs read of the graphs around
        them; those left out have no name and no shape."""
        return [self.builder.value(t) for t in operands_of(self.node)]

    def operand(self, index: int) -> Value | None:
        """An operand, None where it is left out."""
        tensors = self.node.inputs
        given = index < len(tensors) and bool(tensors[index].name)
        return self.builder.value(tensors[index]) if given else None

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
        """The gradient of the first result; zeros where none has reached it."""
        return self.gradient(0)

    def gradient(self, output: int) -> Value:
        """The gradient of a result; zeros where none has reached it."""
        found = self.dys[output]
        if found is None:
            y = self.builder.value(self.node.outputs[output])
            return self.builder.zeros(y.shape, y.dtype)
        return found

    def output(self, index: int, dtype: Any, shape: Sequence[int]) -> Value:
        """A result, which the node is made to give where it did not: of this type and shape."""
        outputs = self.node.outputs
        while len(outputs) <= index:
            outputs.append(gs.Variable.empty())
        if not outputs[index].name:
            outputs[index] = gs.Variable(self.builder.fresh(f"result{index}"), dtype, list(shape))
        return self.builder.value(outputs[index])

    def constant(self, index: int) -> Array | None:
        """The value of an operand, None where it is computed, fed or left out."""
        given = index < len(self.node.inputs) and self.node.inputs[index].name
        return constant(self.node.inputs[index]) if given else None

    def attr(self, name: str) -> Any:
        """An attribute of the node, or its default; None where it has neither."""
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
    """What a node reads: its operands, and behind them what its subgraphs read around them, each
    once."""
    inner = {t.name: t for t, _, _ in captured(node)}
    return [*node.inputs, *inner.values()]


@dataclass(frozen=True)
class Entry:
    """A rule, and which operands of the op are trained where they are stored with the model; what a
    `message` reads may come out of another on another rank."""

    function: VjpFunction
    trained: Sequence[int] = field(default=())
    message: bool = False


_RULES: dict[tuple[str, str], Entry] = {}
_NONE: dict[tuple[str, str], str] = {}
_CARRIERS: set[tuple[str, str]] = set()


def vjp(
    *ops: str, domain: str = "", trained: Sequence[int] = (), message: bool = False
) -> Callable[[VjpFunction], VjpFunction]:
    """Registers a gradient rule for one op or a family of them. `trained` are operands in the role
    of weight, bias, scale or table. Of `message` ops all rules are asked, and what they add is
    kept, as soon as one of them may carry a gradient: every rank must do its part."""

    def register(function: VjpFunction) -> VjpFunction:
        for op in " ".join(ops).split():
            assert (domain, op) not in _RULES, f"two gradients for {op}"
            _RULES[domain, op] = Entry(function, trained, message)
        return function

    return register


def no_gradient(ops: str, reason: str, domain: str = "", carries: bool = False) -> None:
    """Says why ops have no gradient: `no_gradient("Unique", "...")`. On the way from a parameter to
    the loss they are an error; with `carries` also where they hand numbers on in another guise:
    rounded, or as a sequence of tensors."""
    for op in ops.split():
        assert (domain, op) not in _NONE, f"two reasons for {op}"
        _NONE[domain, op] = reason
        if carries:
            _CARRIERS.add((domain, op))


def registered() -> Mapping[tuple[str, str], Entry]:
    """Every gradient rule by (domain, op)."""
    return _RULES


def without() -> Mapping[tuple[str, str], str]:
    """Why ops have no gradient, by (domain, op)."""
    return _NONE


def entry_of(node: gs.Node) -> Entry | None:
    """The gradient rule of a node's op, None where there is none."""
    return _RULES.get(("" if node.domain in (None, "ai.onnx") else node.domain, node.op))


def is_message(node: gs.Node) -> bool:
    """Whether what a node reads may come out of another on another rank."""
    entry = entry_of(node)
    return entry is not None and entry.message


def carries(node: gs.Node) -> bool:
    """Whether results of any type are numbers that a gradient would have to pass through."""
    return (node.domain or "", node.op) in _CARRIERS


def is_trainable_type(tensor: gs.Tensor) -> bool:
    """Whether a tensor can carry a gradient: it has a name and holds floating-point numbers."""
    return bool(tensor.name) and is_float(tensor)
