"""Gradients of reductions and of softmax."""

from __future__ import annotations

import numpy as np

from onnxpar.base.errors import ModelError
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


def reduced_axes(v: Vjp) -> list[int]:
    """Returns the axes over which a node reduces. Errors: ModelError if they are not constant."""
    axes = v.constant(1)
    if axes is None and v.operand(1) is not None:
        raise ModelError(
            f"{v.node.op} '{v.node.name}' has no gradient, because its axes are not constant; make "
            f"{v.node.inputs[1].name!r} an initializer of the model"
        )
    if axes is None or not axes.size:
        return [] if v.attr("noop_with_empty_axes") else list(range(v.x.rank))
    return sorted(int(a) % v.x.rank for a in axes)


def kept(v: Vjp, reduced: Value) -> Value:
    """Returns a result of a reduction, or its gradient, with the reduced axes as dimensions of size
    1."""
    axes = reduced_axes(v)
    return reduced.reshape([1 if a in axes else s for a, s in enumerate(v.x.shape)])


@vjp("ReduceSum")
def reduce_sum(v: Vjp) -> Grads:
    return [kept(v, v.dy).expand(v.x.shape)]


@vjp("ReduceMean")
def reduce_mean(v: Vjp) -> Grads:
    count = int(np.prod([v.x.shape[a] for a in reduced_axes(v)], dtype=np.int64))
    return [(kept(v, v.dy) * (1 / max(count, 1))).expand(v.x.shape)]


@vjp("ReduceMax", "ReduceMin")
def reduce_extreme(v: Vjp) -> Grads:
    """The gradient rule of ReduceMax and ReduceMin: equal elements share the gradient, as in
    PyTorch's amax."""
    holds = v.x.equal(kept(v, v.y)).cast(v.x.dtype)
    return [kept(v, v.dy) * holds / holds.sum(reduced_axes(v), keepdims=True)]


@vjp("ReduceProd")
def reduce_prod(v: Vjp) -> Grads:
    """The gradient rule of ReduceProd. The derivative by an element is the product of the other
    elements; it is 0 if another element is 0."""
    axes = reduced_axes(v)
    zero = v.x.equal(0.0)
    zeros = zero.cast(v.x.dtype)
    factors = zero.where(1.0, v.x)
    product = factors if not axes else factors.op("ReduceProd", np.array(axes), keepdims=1)
    other_zeros = zeros.sum(axes, keepdims=True) - zeros
    return [other_zeros.equal(0.0).where(kept(v, v.dy) * product / factors, 0.0)]


@vjp("ReduceL1")
def reduce_l1(v: Vjp) -> Grads:
    return [kept(v, v.dy) * v.x.op("Sign")]


@vjp("ReduceL2")
def reduce_l2(v: Vjp) -> Grads:
    """The gradient rule of ReduceL2: zero where the norm is zero, as in PyTorch."""
    norm = kept(v, v.y)
    return [v.x * norm.equal(0.0).where(0.0, kept(v, v.dy) / norm)]


@vjp("ReduceSumSquare")
def reduce_sum_square(v: Vjp) -> Grads:
    return [kept(v, v.dy) * v.x * 2.0]


@vjp("ReduceLogSum")
def reduce_log_sum(v: Vjp) -> Grads:
    return [(kept(v, v.dy) / v.x.sum(reduced_axes(v), keepdims=True)).expand(v.x.shape)]


@vjp("ReduceLogSumExp")
def reduce_log_sum_exp(v: Vjp) -> Grads:
    """The gradient rule of ReduceLogSumExp: the derivative is the softmax. Its sum is computed
    again, because the rounding error of a large result would be too big."""
    powers = (v.x - kept(v, v.y)).exp()
    return [kept(v, v.dy) * powers / powers.sum(reduced_axes(v), keepdims=True)]


@vjp("Hardmax")
def hardmax(v: Vjp) -> Grads:
    """The gradient rule of Hardmax: no gradient, because it is a step function."""
    return []


@vjp("Softmax")
def softmax(v: Vjp) -> Grads:
    """The gradient rule of Softmax. The result of a fully masked row is NaN; if the model replaces
    NaNs behind the node, the gradient of such a row is zero."""
    y = v.y
    if any(reader.op == "IsNaN" for reader in y.tensor.outputs):
        y = y.op("IsNaN").where(0.0, y)
    weighted = v.dy * y
    return [weighted - y * weighted.sum([v.attr("axis")], keepdims=True)]


@vjp("LogSoftmax")
def log_softmax(v: Vjp) -> Grads:
    return [v.dy - v.y.exp() * v.dy.sum([v.attr("axis")], keepdims=True)]
