"""Rules of elementwise ops with NumPy broadcasting, `d0 d1, d1 -> d0 d1`. Docstrings name the
operands in which an op is linear: such an operand may be a partial sum on each rank, which the op
passes on. An op that is non-decreasing passes a partial max or min on."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, constant, dtype_of, given, is_float, tensor_shape
from onnxpar.rules.notation import ONE, Expr, Spec, Var
from onnxpar.rules.random_draws import training_dropout
from onnxpar.rules.rule import FIRST, Rule, rule


def broadcast(node: gs.Node, **fields: Any) -> Rule:
    """Returns the rule of NumPy broadcasting, `d0 d1, d1 -> d0 d1`: operands are aligned at the
    last dimension, and dimensions of one element match any size. `fields` are further fields of the
    rule."""
    shapes = [tensor_shape(t) if t.name else None for t in node.inputs]
    out = tensor_shape(node.outputs[0]) or ()
    sizes: dict[str, Size] = {f"d{i}": s for i, s in enumerate(out) if s != 1}

    def spec(shape: tuple[Size, ...] | None) -> Spec | None:
        if shape is None:
            return None
        skip = len(out) - len(shape)
        dims: list[Expr] = []
        for i, size in enumerate(shape, skip):
            dims.append(ONE if size == 1 else Var(f"d{i}"))
        return tuple(dims)

    outputs = tuple(spec(out) if t.name else None for t in node.outputs)
    return Rule.of(tuple(map(spec, shapes)), outputs, sizes, **fields)


def every_operand(node: gs.Node) -> frozenset[int]:
    """The indices of all operands."""
    return frozenset(range(len(node.inputs)))


@rule("Add", "Sum")
def add(node: gs.Node) -> Rule:
    """Sharding rule of Add and Sum: `d0 d1, d1 -> d0 d1`. They are linear in all operands together,
    so all may be partial sums of the ranks; for floats, they are non-decreasing in each operand."""
    increasing = every_operand(node) if is_float(node.outputs[0]) else frozenset[int]()
    return broadcast(node, linear=(every_operand(node),), monotone=increasing)


@rule("Sub")
def sub(node: gs.Node) -> Rule:
    """Sharding rule of Sub: `d0 d1, d1 -> d0 d1`. It is linear in both operands together, so both
    may be partial sums of the ranks; for floats, it is non-decreasing in the first."""
    increasing = FIRST if is_float(node.outputs[0]) else frozenset[int]()
    return broadcast(node, linear=(every_operand(node),), monotone=increasing)


@rule("Mean")
def mean(node: gs.Node) -> Rule:
    """Sharding rule of Mean: `d0 d1, d1 -> d0 d1`. For floating-point types, it is linear in all
    operands together, so all may be partial sums of the ranks."""
    return broadcast(node, linear=(every_operand(node),) if is_float(node.outputs[0]) else ())


@rule("Mul")
def mul(node: gs.Node) -> Rule:
    """Sharding rule of Mul: `d0 d1, d1 -> d0 d1`. It is linear in each operand by itself, so one of
    them may be a partial sum of the ranks."""
    return broadcast(node, linear=(frozenset({0}), frozenset({1})))


@rule("Div")
def div(node: gs.Node) -> Rule:
    """Sharding rule of Div: `d0 d1, d1 -> d0 d1`. For floating-point types, it is linear in the
    numerator, which may be a partial sum of the ranks."""
    return broadcast(node, linear=(FIRST,) if is_float(node.outputs[0]) else ())


@rule("Max", "Min")
def extremum(node: gs.Node) -> Rule:
    """Sharding rule of Max and Min: `d0 d1, d1 -> d0 d1`. They are non-decreasing in every operand,
    so an operand may be a partial max or min of the ranks."""
    return broadcast(node, monotone=every_operand(node))


@rule("Where")
def where(node: gs.Node) -> Rule:
    """Sharding rule of Where: `d0 d1, d0 d1, d0 d1 -> d0 d1`. It is linear in both branches
    (operands 1 and 2) together, so both may be partial sums of the ranks; it is non-decreasing in
    each."""
    return broadcast(node, linear=(frozenset({1, 2}),), monotone=frozenset({1, 2}))


@rule("Identity")
def identity(node: gs.Node) -> Rule:
    """Sharding rule of Identity: `d0 d1 -> d0 d1`; its operand may be a partial sum, max or min of
    the ranks, and so is its result."""
    return broadcast(node, linear=(FIRST,), monotone=FIRST)


@rule("Neg")
def neg(node: gs.Node) -> Rule:
    """Sharding rule of Neg: `d0 d1 -> d0 d1`; its operand may be a partial sum of the ranks, and so
    is its result."""
    return broadcast(node, linear=(FIRST,))


@rule("Cast")
def cast(node: gs.Node) -> Rule:
    """Sharding rule of Cast: `d0 d1 -> d0 d1`. The operand may be a partial sum of the ranks in a
    Cast to a wider floating-point type, and a partial max or min in one from numbers to any
    floating-point type."""
    before, after = (dtype_of(t) for t in (node.inputs[0], node.outputs[0]))
    if before is None or after is None or not is_float(node.outputs[0]):
        return broadcast(node)
    number = is_float(node.inputs[0]) or np.issubdtype(before, np.integer)
    wider = is_float(node.inputs[0]) and before.itemsize < after.itemsize
    same = before == after
    return broadcast(
        node,
        linear=(FIRST,) if wider or same else (),
        monotone=FIRST if number else frozenset(),
    )


@rule("CastLike")
def cast_like(node: gs.Node) -> Rule:
    """Sharding rule of CastLike: `d0 d1, _ -> d0 d1`; only the type of the second operand matters,
    not its shape."""
    aligned = broadcast(node)
    return Rule.of((aligned.inputs[0], None), aligned.outputs, aligned.sizes)


@rule("Dropout")
def dropout(node: gs.Node) -> Rule:
    """Sharding rule of Dropout: without training, that of Identity, but with a mask as result, the
    operand may not be partial; in training, the rule of `training_dropout`."""
    training = given(node, 2)
    if training is not None:
        value = constant(training)
        if value is None or value.any():
            return training_dropout(node)
    if len(node.outputs) > 1 and node.outputs[1].name:
        return broadcast(node)
    return broadcast(node, linear=(FIRST,), monotone=FIRST)


@rule(
    "Relu Sigmoid Tanh Exp Erf Ceil Floor Round Softplus Sign Clip",
)
def monotone(node: gs.Node) -> Rule:
    """Sharding rule of elementwise functions that are non-decreasing in operand 0, also at the
    infinities: `d0 d1 -> d0 d1`; that operand may be a partial max or min of the ranks."""
    return broadcast(node, monotone=FIRST)


@rule("LeakyRelu", "Elu", "Celu", "Selu", "HardSigmoid", "ThresholdedRelu")
def monotone_by_slope(node: gs.Node) -> Rule:
    """Sharding rule of LeakyRelu, Elu and their like: `d0 d1 -> d0 d1`. If their slopes are
    positive, they are non-decreasing, and the operand may be a partial max or min of the ranks."""
    slopes = (node.attrs.get(name, 1.0) for name in ("alpha", "gamma"))
    return broadcast(node, monotone=FIRST if all(s > 0 for s in slopes) else frozenset())


@rule(
    "Asinh Sinh Atan Softsign Abs Reciprocal Log Sqrt Sin Cos Tan Asin Acos Cosh Acosh",
    "Atanh Gelu HardSwish Mish Swish Shrink Not IsNaN IsInf BitwiseNot Pow Mod PRelu And Or Xor",
    "Equal Greater GreaterOrEqual Less LessOrEqual BitShift BitwiseAnd BitwiseOr BitwiseXor",
)
def elementwise(node: gs.Node) -> Rule:
    """Sharding rule of all other elementwise ops: `d0 d1, d1 -> d0 d1`; no operand may be
    partial."""
    return broadcast(node)


@rule("BitCast")
def bit_cast(node: gs.Node) -> Rule:
    """Sharding rule of BitCast, which reinterprets elements as others with the same number of bits:
    `d0 d1 -> d0 d1`; the operand may not be partial."""
    return broadcast(node)
