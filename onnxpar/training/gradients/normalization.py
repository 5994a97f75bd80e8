"""Gradients of normalizations. 16-bit floats are normalized in float32.

Statistics are ReduceMeans over the tensor, first for the mean and then for the variance, so they
are correct for a split tensor, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from onnxpar.graph.tensors import float_attr
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


def _standardized(x: Value, axes: Sequence[int], epsilon: float) -> tuple[Value, Value]:
    """Returns (x minus its mean over axes, divided by its standard deviation; the reciprocal of the
    deviation)."""
    centred = x - x.mean(axes, keepdims=True)
    variance = (centred * centred).mean(axes, keepdims=True)
    inverse = (variance + epsilon).sqrt().op("Reciprocal")
    return centred * inverse, inverse


def _scaled_to_one(x: Value, axes: Sequence[int], epsilon: float) -> tuple[Value, Value]:
    """Returns (x divided by its root mean square over axes; the reciprocal of that root)."""
    square = (x * x).mean(axes, keepdims=True)
    inverse = (square + epsilon).sqrt().op("Reciprocal")
    return x * inverse, inverse


def _through(d: Value, normal: Value, inverse: Value, axes: Sequence[int]) -> Value:
    """Returns the gradient of x, given the gradient `d` of the standardized x and the results of
    `_standardized`."""
    return _through_scaling(d - d.mean(axes, keepdims=True), normal, inverse, axes)


def _through_scaling(d: Value, normal: Value, inverse: Value, axes: Sequence[int]) -> Value:
    """Like `_through`, for a normalization that subtracts no mean."""
    return (d - normal * (d * normal).mean(axes, keepdims=True)) * inverse


def _fitted(v: Vjp, *gradients: Value) -> Grads:
    """Returns the gradients of operands, each summed to the operand's shape and then rounded to its
    dtype; None for a missing operand."""
    operands = (v.operand(i) for i in range(len(gradients)))
    return [
        None if x is None else g.sum_to(x.shape).cast(x.dtype)
        for x, g in zip(operands, gradients, strict=True)
    ]


@vjp("LayerNormalization", trained=(1, 2))
def layer_normalization(v: Vjp) -> Grads:
    """The gradient rule of LayerNormalization. Uses the node's own mean and deviation if it
    computes them in float32; else computes them again."""
    x, dy = v.x.wide(), v.dy.wide()
    axes = _last(v)
    if v.attr("stash_type") == 1 and x.dtype == np.float32:
        moments = [*x.shape[: axes[0]], *[1] * len(axes)]
        mean, inverse = (v.output(i, np.float32, moments) for i in (1, 2))
        normal = (x - mean) * inverse
    else:
        normal, inverse = _standardized(x, axes, v.attr("epsilon"))
    through = _through(dy * v.operands[1].wide(), normal, inverse, axes)
    count = max(prod(x.shape[a] for a in axes), 1)
    for i, slope in ((1, 1.0), (2, -normal * inverse * inverse)):  # mean and deviation as results
        if i < len(v.dys) and (of_moment := v.dys[i]) is not None:
            through = through + of_moment.cast(x.dtype) * slope * (1 / count)
    return _fitted(v, through, dy * normal, dy)


@vjp("RMSNormalization", trained=(1,))
def rms_normalization(v: Vjp) -> Grads:
    x, dy, axes = v.x.wide(), v.dy.wide(), _last(v)
    normal, inverse = _scaled_to_one(x, axes, v.attr("epsilon"))
    scaled = dy * v.operands[1].wide()
    return _fitted(v, _through_scaling(scaled, normal, inverse, axes), dy * normal)


def _last(v: Vjp) -> list[int]:
    """Returns the axes from the attribute `axis` to the last."""
    return list(range(v.attr("axis") % v.x.rank, v.x.rank))


@vjp("SkipLayerNormalization", domain="com.microsoft", trained=(2, 3, 4))
def skip_layer_normalization(v: Vjp) -> Grads:
    total, dy = _skipped(v, 4), v.dy.wide()
    normal, inverse = _standardized(total, [-1], float_attr(v.node, "epsilon", 1e-12))
    through = _with_sum(v, _through(dy * v.operands[2].wide(), normal, inverse, [-1]))
    return _fitted(v, through, through, dy * normal, dy, through)


@vjp("SkipSimplifiedLayerNormalization", domain="com.microsoft", trained=(2, 3))
def skip_rms_normalization(v: Vjp) -> Grads:
    total, dy = _skipped(v, 3), v.dy.wide()
    normal, inverse = _scaled_to_one(total, [-1], float_attr(v.node, "epsilon", 1e-12))
    scaled = dy * v.operands[2].wide()
    through = _with_sum(v, _through_scaling(scaled, normal, inverse, [-1]))
    return _fitted(v, through, through, dy * normal, through)


def _skipped(v: Vjp, bias: int) -> Value:
    """Returns the sum that is normalized: x, the skip connection and an optional bias."""
    x, around = (x.wide() for x in v.operands[:2])
    total, offset = x + around, v.operand(bias)
    return total if offset is None else total + offset.wide()


def _with_sum(v: Vjp, through: Value) -> Value:
    """Returns the gradient of the sum that is normalized: `through`, which comes through the
    normalization, plus the gradient of the node's result that is the sum itself, if there is
    one."""
    beside = v.dys[3] if len(v.dys) > 3 else None
    return through if beside is None else through + beside.wide()


@vjp("BatchNormalization", trained=(1, 2))
def batch_normalization(v: Vjp) -> Grads:
    """The gradient rule of BatchNormalization. In training mode, the gradient passes through the
    statistics of the batch, and running statistics have no gradient."""
    axes = [0, *range(2, v.x.rank)]
    if v.attr("training_mode"):
        return _by_channel(v, axes)
    x, dy = v.x.wide(), v.dy.wide()
    scale, _, mean, variance = (_channels(v, i, x.dtype) for i in range(1, 5))
    inverse = (variance + v.attr("epsilon")).sqrt().op("Reciprocal")
    through = dy * (scale * inverse)
    normal = (x - mean) * inverse
    of_bias, of_scale = dy.sum(axes), (dy * normal).sum(axes)
    factor = (scale * inverse).reshape(of_bias.shape)
    of_variance = of_scale * factor * inverse.reshape(of_bias.shape) * -0.5
    return _fitted(v, through, of_scale, of_bias, -of_bias * factor, of_variance)


@vjp("InstanceNormalization", trained=(1, 2))
def instance_normalization(v: Vjp) -> Grads:
    return _by_channel(v, range(2, v.x.rank))


def _by_channel(v: Vjp, axes: Sequence[int]) -> Grads:
    """Returns the gradients of a normalization over axes, with scale and bias per channel. The sums
    that are the gradients of scale and bias also serve for the gradient of x."""
    x, dy = v.x.wide(), v.dy.wide()
    scale = _channels(v, 1, x.dtype)
    normal, inverse = _standardized(x, axes, v.attr("epsilon"))
    of_bias = dy.sum(axes, keepdims=True)
    of_scale = (dy * normal).sum(axes, keepdims=True)
    share = 1 / max(prod(x.shape[a] for a in axes), 1)
    through = (dy - (of_bias + normal * of_scale) * share) * (scale * inverse)
    rest = [a for a in range(x.rank) if a != 1]
    return _fitted(v, through, of_scale.sum(rest), of_bias.sum(rest))


def _channels(v: Vjp, index: int, dtype: np.dtype[np.floating]) -> Value:
    """Returns an operand that has an element per channel, in a shape that broadcasts over x."""
    operand = v.operands[index].cast(dtype)
    return operand.reshape([operand.size, *[1] * (v.x.rank - 2)])


@vjp("GroupNormalization", trained=(1, 2))
def group_normalization(v: Vjp) -> Grads:
    """The gradient rule of GroupNormalization. Scale and bias are per group before opset 21, and
    per channel from opset 21 on."""
    groups, (batch, channels) = v.attr("num_groups"), v.x.shape[:2]
    grouped = [batch, groups, channels // groups, prod(v.x.shape[2:])]
    x, dy = (t.wide().reshape(grouped) for t in (v.x, v.dy))
    scale = v.operands[1]
    per_group = [groups, scale.size // groups, 1]
    normal, inverse = _standardized(x, [2, 3], v.attr("epsilon"))
    scaled = dy * scale.cast(x.dtype).reshape(per_group)
    through = _through(scaled, normal, inverse, [2, 3]).reshape(v.x.shape)
    sums = ((dy * normal).sum_to(per_group), dy.sum_to(per_group))
    return _fitted(v, through, *(s.reshape(scale.shape) for s in sums))


@vjp("MeanVarianceNormalization")
def mean_variance_normalization(v: Vjp) -> Grads:
    axes = [a % v.x.rank for a in v.attr("axes")]
    x, dy = v.x.wide(), v.dy.wide()
    return _fitted(v, _through(dy, *_standardized(x, axes, 0.0), axes))


@vjp("LpNormalization")
def lp_normalization(v: Vjp) -> Grads:
    """The gradient rule of LpNormalization: zero where the norm is zero."""
    x, axis = v.x, [v.attr("axis")]
    is_sum = v.attr("p") == 1
    size = x.op("Abs") if is_sum else x * x
    norm = size.sum(axis, keepdims=True)
    norm = norm if is_sum else norm.sqrt()
    direction = x.op("Sign") if is_sum else v.y
    through = v.dy - direction * (v.dy * v.y).sum(axis, keepdims=True)
    return [norm.equal(0.0).where(0.0, through / norm)]
