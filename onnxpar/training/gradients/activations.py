"""Gradients of activation functions. At kinks, they are equal to PyTorch's."""

from __future__ import annotations

import math

from onnxpar.graph.tensors import float_attr
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp

_MICROSOFT = "com.microsoft"
_LEVEL = 10.0
"""The bound to which Gelu's operand is clipped: for larger operands tanh is 1 anyway, and up to
this bound a cube does not overflow in any dtype."""


@vjp("Relu")
def relu(v: Vjp) -> Grads:
    return [(v.y > 0.0).where(v.dy, 0.0)]


@vjp("LeakyRelu")
def leaky_relu(v: Vjp) -> Grads:
    return [(v.x > 0.0).where(v.dy, v.dy * v.attr("alpha"))]


@vjp("PRelu", trained=(1,))
def prelu(v: Vjp) -> Grads:
    x, slope = v.operands
    positive = x > 0.0
    return positive.where(v.dy, v.dy * slope), positive.where(0.0, v.dy * x)


@vjp("ThresholdedRelu")
def thresholded_relu(v: Vjp) -> Grads:
    return [(v.x > v.attr("alpha")).where(v.dy, 0.0)]


@vjp("Shrink")
def shrink(v: Vjp) -> Grads:
    return [(v.x.op("Abs") > v.attr("lambd")).where(v.dy, 0.0)]


@vjp("Elu")
def elu(v: Vjp) -> Grads:
    return [(v.x > 0.0).where(v.dy, v.dy * v.attr("alpha") * falling_exp(v.x))]


@vjp("Selu")
def selu(v: Vjp) -> Grads:
    scaled = v.dy * v.attr("gamma")
    return [(v.x > 0.0).where(scaled, scaled * v.attr("alpha") * falling_exp(v.x))]


@vjp("Celu")
def celu(v: Vjp) -> Grads:
    return [v.dy * falling_exp(v.x / v.attr("alpha"))]


def falling_exp(x: Value) -> Value:
    """Returns exp(min(x, 0))."""
    return x.op("Min", 0.0).exp()


@vjp("Sigmoid")
def logistic(v: Vjp) -> Grads:
    return [v.dy * v.y * (1.0 - v.y)]


@vjp("HardSigmoid")
def hard_sigmoid(v: Vjp) -> Grads:
    rises = (v.y > 0.0).op("And", v.y < 1.0)
    return [rises.where(v.dy * v.attr("alpha"), 0.0)]


@vjp("HardSwish")
def hard_swish(v: Vjp) -> Grads:
    bent = (v.x < 3.0).where(v.dy * (v.x * (1 / 3) + 0.5), v.dy)
    return [(v.x > -3.0).where(bent, 0.0)]


@vjp("Softplus")
def softplus(v: Vjp) -> Grads:
    return [v.dy * sigmoid(v.x)]


@vjp("Softsign")
def softsign(v: Vjp) -> Grads:
    wide = v.x.op("Abs") + 1.0
    return [v.dy / wide / wide]


@vjp("Mish")
def mish(v: Vjp) -> Grads:
    """The gradient rule of Mish, which is x tanh(softplus(x))."""
    t = v.x.op("Softplus").op("Tanh")
    return [v.dy * (t + v.x * (1.0 - t * t) * sigmoid(v.x))]


@vjp("Swish")
def swish(v: Vjp) -> Grads:
    return [v.dy * swish_slope(v.x, v.attr("alpha"))]


@vjp("QuickGelu", domain=_MICROSOFT)
def quick_gelu(v: Vjp) -> Grads:
    return [v.dy * swish_slope(v.x, float_attr(v.node, "alpha", 1.702))]


def swish_slope(x: Value, alpha: float) -> Value:
    """Returns the derivative of x sigmoid(alpha x)."""
    s = sigmoid(x * alpha)
    return s * (1.0 + x * alpha * (1.0 - s))


@vjp("Gelu")
def gelu(v: Vjp) -> Grads:
    slope = gelu_tanh_slope if v.attr("approximate") == "tanh" else gelu_slope
    return [v.dy * slope(v.x)]


@vjp("Gelu", domain=_MICROSOFT)
def contrib_gelu(v: Vjp) -> Grads:
    return [v.dy * gelu_slope(v.x)]


@vjp("BiasGelu", domain=_MICROSOFT, trained=(1,))
def bias_gelu(v: Vjp) -> Grads:
    x, bias = v.operands
    return [v.dy * gelu_slope(x + bias)] * 2


@vjp("FastGelu", domain=_MICROSOFT, trained=(1,))
def fast_gelu(v: Vjp) -> Grads:
    bias = v.operand(1)
    shifted = v.x if bias is None else v.x + bias
    return [v.dy * gelu_tanh_slope(shifted)] * len(v.node.inputs)


def gelu_slope(x: Value) -> Value:
    """Returns the derivative of Gelu, x times the normal distribution's cumulative function."""
    cumulative = 0.5 * (1.0 + (x * math.sqrt(0.5)).op("Erf"))
    density = (-0.5 * x * x).exp() * (1 / math.sqrt(2 * math.pi))
    return cumulative + x * density


def gelu_tanh_slope(x: Value) -> Value:
    """Returns the derivative of Gelu's approximation by tanh. Its factors are folded into few
    constants, because each operation on a large tensor takes a pass over memory."""
    x = x.op("Clip", -_LEVEL, _LEVEL)
    square, scale = x * x, math.sqrt(2 / math.pi)
    t = (x * (square * (0.044715 * scale) + scale)).op("Tanh")
    half_slope = x * (square * (1.5 * 0.044715 * scale) + 0.5 * scale)
    return (t * 0.5 + 0.5) + (1.0 - t * t) * half_slope


def sigmoid(x: Value) -> Value:
    """Returns the logistic function of x."""
    return x.op("Sigmoid")
