"""Random elementwise ops."""

from __future__ import annotations

import math

import numpy as np
from random_graphs.builder import ELEMENTS, Builder, NotHere, Value, makes


@makes("Identity Neg Abs Relu Dropout")
def exact(b: Builder, op: str) -> object:
    """Integers stay integers."""
    x = b.pick(b.choose(["float", "double"]))
    return b.add(op, [x], x.bound)


@makes("Ceil Floor Round Sign ThresholdedRelu Shrink")
def steps(b: Builder, op: str) -> object:
    """These jump, so they need exact operands."""
    x = b.pick(exact=True)
    return b.add(op, [x], max(x.bound, 1.0) + (op == "Shrink"), rounds=op == "Shrink")


@makes("Clip")
def clip(b: Builder, op: str) -> object:
    """Both bounds."""
    x = b.pick()
    low, high = (b.constant(np.float32(v)) for v in (-2, 2))
    return b.add(op, [x, low, high], 2.0)


SMOOTH = {
    "Sigmoid": 1.0,
    "Tanh": 1.0,
    "Erf": 1.0,
    "Softplus": 1.0,
    "LeakyRelu": 1.0,
    "Elu": 1.0,
    "Selu": 1.8,
    "Celu": 1.0,
    "HardSigmoid": 1.0,
    "Asinh": 1.0,
    "Atan": 1.6,
    "Softsign": 1.0,
    "Sin": 1.0,
    "Cos": 1.0,
    "Gelu": 1.2,
    "HardSwish": 1.5,
    "Mish": 1.2,
}
"""Growth of errors, at most; results are no larger than operands, or this."""


@makes(" ".join(SMOOTH))
def smooth(b: Builder, op: str) -> object:
    """Lipschitz functions."""
    x = b.pick()
    gain = SMOOTH[op]
    return b.add(op, [x], gain * max(x.bound, 1.0), gain=gain, rounds=True)


@makes("Exp Sinh Cosh")
def steep(b: Builder, op: str) -> object:
    """Of small operands."""
    x = b.pick(bound=4.0)
    return b.add(op, [x], math.exp(x.bound), gain=math.exp(x.bound), rounds=True)


@makes("Tan Asin Acos Atanh")
def inside(b: Builder, op: str) -> object:
    """Of operands in [-1/2, 1/2]."""
    (x,) = smooth(b, "Tanh")  # type: ignore[misc]
    (x,) = b.add("Mul", [x, b.constant(np.float32(0.5))], 0.5)
    return b.add(op, [x], 2.2, gain=1.4, rounds=True)


@makes("Log Sqrt Reciprocal Acosh")
def above(b: Builder, op: str) -> object:
    """Of operands of at least 2."""
    x = _at_least_2(b, b.pick(bound=1000.0))
    return b.add(op, [x], max(x.bound, 1.0), rounds=True)


def _at_least_2(b: Builder, x: Value) -> Value:
    (x,) = b.add("Abs", [x], x.bound)
    (x,) = b.add("Add", [x, b.constant(np.array(2, np.float32))], x.bound + 2)
    return x


@makes("Add Sub Max Min")
def binary(b: Builder, op: str) -> object:
    """With broadcasting, of numbers of any kind."""
    x = b.pick(b.choose(["float", "int", "double"]))
    y = b.partner(x)
    operands = [x, y] if b.coin() else [y, x]
    return b.add(op, operands, x.bound + y.bound)


@makes("Mul")
def multiply(b: Builder, op: str) -> object:
    """With broadcasting."""
    x = b.pick(b.choose(["float", "int", "double"]))
    y = b.partner(x)
    return b.add(op, [x, y], x.bound * y.bound, gain=max(x.bound, y.bound))


@makes("Sum Mean")
def variadic(b: Builder, op: str) -> object:
    """Of three."""
    x = b.pick()
    y = b.partner(x)
    z = b.partner(x)
    bound = x.bound + y.bound + z.bound
    try:
        np.broadcast_shapes(x.shape, y.shape, z.shape)
    except ValueError:
        raise NotHere from None
    return b.add(op, [x, y, z], bound, rounds=op == "Mean")


@makes("Div")
def divide(b: Builder, op: str) -> object:
    """By at least 2."""
    x = b.pick()
    y = _at_least_2(b, b.partner(x, bound=1000.0))
    return b.add(op, [x, y], x.bound, gain=max(x.bound, 1.0), rounds=True)


@makes("Pow")
def power(b: Builder, op: str) -> object:
    """Squares."""
    x = b.pick(bound=60.0)
    return b.add(op, [x, b.constant(np.float32(2))], x.bound**2, gain=2 * x.bound)


@makes("PRelu")
def parametric(b: Builder, op: str) -> object:
    """A slope that is broadcast to the operand."""
    x = b.pick(bound=1000.0)
    slope = b.fresh(x.shape[-1:])
    return b.add(op, [x, slope], x.bound * slope.bound, gain=slope.bound)


@makes("Mod BitwiseAnd BitwiseOr BitwiseXor")
def whole_numbers(b: Builder, op: str) -> object:
    """Of integers."""
    x = b.pick("int") if b.coin() else b.fresh(b.shape(), "int", 0, 8)
    y = b.fresh(x.shape[-1:], "int", 1, 5)
    return b.add(op, [x, y], 2 * x.bound + 8)


@makes("BitwiseNot")
def bitwise_not(b: Builder, op: str) -> object:
    """Of integers."""
    x = b.pick("int")
    return b.add(op, [x], x.bound + 1)


@makes("Equal Greater GreaterOrEqual Less LessOrEqual")
def compare(b: Builder, op: str) -> object:
    """Of exact numbers."""
    x = b.pick(b.choose(["float", "int"]), exact=True)
    return b.add(op, [x, b.partner(x, exact=True)], 1.0, kind="bool")


@makes("And Or Xor")
def logic(b: Builder, op: str) -> object:
    """Of two truth values."""
    x = b.pick("bool")
    return b.add(op, [x, b.partner(x)], 1.0)


@makes("Not")
def negate(b: Builder, op: str) -> object:
    """Of truth values."""
    return b.add(op, [b.pick("bool")], 1.0)


@makes("IsNaN IsInf")
def odd_numbers(b: Builder, op: str) -> object:
    """Nothing is; whether it reads a pending sum matters all the same."""
    x = b.pick()
    (flags,) = b.add(op, [Value(x.name, x.shape, x.kind, x.bound)], 1.0, kind="bool")
    return flags


@makes("Where")
def where(b: Builder, op: str) -> object:
    """A choice between two values, or a value and nothing."""
    x = b.pick()
    y = b.partner(x)
    shape = np.broadcast_shapes(x.shape, y.shape)
    there = [
        v for v in b.values if v.kind == "bool" and v.shape == shape[len(shape) - len(v.shape) :]
    ]
    mask = b.choose(there) if there and b.coin() else b.fresh(shape[-2:], "bool")
    return b.add(op, [mask, x, y], max(x.bound, y.bound), kind=x.kind)


CASTS = {
    "float": ["double", "int", "float"],
    "double": ["float"],
    "int": ["float"],
    "bool": ["float", "int"],
}


@makes("Cast")
def cast(b: Builder, op: str) -> object:
    """To another kind; to integers only what is exact."""
    x = b.pick(b.choose(list(CASTS)))
    to = b.choose([k for k in CASTS[x.kind] if x.is_exact or k != "int"])
    return b.add(op, [x], x.bound, kind=to, to=ELEMENTS[to][0])


@makes("CastLike")
def cast_like(b: Builder, op: str) -> object:
    """Like a value of any shape."""
    x, like = b.pick(), b.pick(b.choose(["float", "double"]))
    return b.add(op, [x, Value(like.name, like.shape, like.kind, 0.0)], x.bound, kind=like.kind)
