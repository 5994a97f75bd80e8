"""Gradients of elementwise ops."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np

from onnxpar.graph.tensors import is_float
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@vjp("Add", "Sum")
def add(v: Vjp) -> Grads:
    return [v.dy] * len(v.node.inputs)


@vjp("Sub")
def sub(v: Vjp) -> Grads:
    return v.dy, -v.dy


@vjp("Mul")
def mul(v: Vjp) -> Grads:
    a, b = v.operands
    return v.dy * b, v.dy * a


@vjp("Div")
def div(v: Vjp) -> Grads:
    _, b = v.operands
    return v.dy / b, -v.dy * v.y / b


@vjp("Mod")
def mod(v: Vjp) -> Grads:
    """The gradient rule of Mod, which is a - b * q, where the quotient q is a step function without
    a gradient."""
    a, b = v.operands
    quotient = (a - v.y) / b
    return v.dy, -v.dy * quotient


@vjp("Mean")
def mean(v: Vjp) -> Grads:
    count = len(v.node.inputs)
    return [v.dy * (1 / count)] * count


@vjp("Max", "Min")
def extreme(v: Vjp) -> Grads:
    """The gradient rule of Max and Min: equal largest (or least) elements share the gradient, as in
    PyTorch."""
    holds = [x.equal(v.y).cast(v.y.dtype) for x in v.operands]
    count = reduce(lambda a, b: a + b, holds)
    return [v.dy * hold / count for hold in holds]


@vjp("Pow")
def power(v: Vjp) -> Grads:
    """The gradient rule of Pow. As in PyTorch, the base gets a zero gradient where the exponent
    is 0, and the exponent gets a zero gradient where the base is 0 and the exponent is not
    negative."""
    base, exponent = v.operands
    number = v.constant(1)
    if number is not None and number.size == 1 and not v.wanted[1]:
        n = float(number.reshape(()))
        if n == 0:
            return []
        return [v.dy * n * (base ** (n - 1) if n != 2 else base)]
    small = exponent.cast(base.dtype)
    of_base = small.equal(0.0).where(0.0, v.dy * small * base.op("Pow", small - 1.0))
    if not is_float(exponent.tensor):
        return [of_base]
    flat = base.equal(0.0).op("And", small >= 0.0)
    return of_base, flat.where(0.0, v.dy * v.y * base.log()).cast(exponent.dtype)


@vjp("Where")
def where(v: Vjp) -> Grads:
    condition = v.operands[0]
    return None, condition.where(v.dy, 0.0), condition.where(0.0, v.dy)


@vjp("Clip")
def clip(v: Vjp) -> Grads:
    """The gradient rule of Clip. A bound gets the gradient of the elements that it replaces; if the
    upper bound is below the lower bound, it gets all gradients. An element that equals a bound
    keeps its gradient."""
    low, high = v.operand(1), v.operand(2)
    bounded = v.x if low is None else v.x.op("Max", low)
    through, of_low, of_high = v.dy, None, None
    if high is not None:
        of_high = (bounded > high).where(v.dy, 0.0)
        through = (bounded > high).where(0.0, v.dy)
    if low is not None:
        of_low = (v.x < low).where(through, 0.0)
        through = (v.x < low).where(0.0, through)
    return through, of_low, of_high


@vjp("Identity")
def identity(v: Vjp) -> Grads:
    return [v.dy]


@vjp("Cast", "CastLike")
def cast(v: Vjp) -> Grads:
    return [v.dy.cast(v.x.dtype)]


@vjp("Floor Ceil Round Sign")
def steps(v: Vjp) -> Grads:
    """The gradient rule of Floor, Ceil, Round and Sign: no gradient, because they are step
    functions."""
    return []


@vjp("Neg")
def neg(v: Vjp) -> Grads:
    return [-v.dy]


@vjp("Abs")
def absolute(v: Vjp) -> Grads:
    return [v.dy * v.x.op("Sign")]


@vjp("Reciprocal")
def reciprocal(v: Vjp) -> Grads:
    return [-v.dy * v.y * v.y]


@vjp("Sqrt")
def sqrt(v: Vjp) -> Grads:
    return [v.dy * 0.5 / v.y]


@vjp("Exp")
def exp(v: Vjp) -> Grads:
    return [v.dy * v.y]


@vjp("Log")
def log(v: Vjp) -> Grads:
    return [v.dy / v.x]


@vjp("Erf")
def erf(v: Vjp) -> Grads:
    return [v.dy * (2 / math.sqrt(math.pi)) * (-v.x * v.x).exp()]


@vjp("Sin")
def sin(v: Vjp) -> Grads:
    return [v.dy * v.x.op("Cos")]


@vjp("Cos")
def cos(v: Vjp) -> Grads:
    return [-v.dy * v.x.op("Sin")]


@vjp("Tan")
def tan(v: Vjp) -> Grads:
    return [v.dy * (v.y * v.y + 1.0)]


@vjp("Asin")
def asin(v: Vjp) -> Grads:
    return [v.dy / (1.0 - v.x * v.x).sqrt()]


@vjp("Acos")
def acos(v: Vjp) -> Grads:
    return [-v.dy / (1.0 - v.x * v.x).sqrt()]


@vjp("Atan")
def atan(v: Vjp) -> Grads:
    return [v.dy / (v.x * v.x + 1.0)]


@vjp("Sinh")
def sinh(v: Vjp) -> Grads:
    return [v.dy * v.x.op("Cosh")]


@vjp("Cosh")
def cosh(v: Vjp) -> Grads:
    return [v.dy * v.x.op("Sinh")]


@vjp("Tanh")
def tanh(v: Vjp) -> Grads:
    return [v.dy * (1.0 - v.y * v.y)]


@vjp("Asinh")
def asinh(v: Vjp) -> Grads:
    return [v.dy / v.y.op("Cosh")]


@vjp("Acosh")
def acosh(v: Vjp) -> Grads:
    return [v.dy / (v.x - 1.0).sqrt() / (v.x + 1.0).sqrt()]


@vjp("Atanh")
def atanh(v: Vjp) -> Grads:
    return [v.dy / (1.0 - v.x * v.x)]


@vjp("Dropout")
def dropout(v: Vjp) -> Grads:
    """The gradient rule of Dropout: applies the mask that the node drew. A Dropout that is switched
    off passes the gradient on."""
    training, mode = v.operand(2), v.constant(2)
    if training is None or (mode is not None and not mode):
        return [v.dy]
    mask = v.output(1, np.bool_, v.x.shape)
    ratio = v.operand(1)
    through = v.dy * 2.0 if ratio is None else v.dy / (1.0 - ratio.cast(v.dy.dtype))
    return [mask.where(through if mode is not None else training.where(through, v.dy), 0.0)]
