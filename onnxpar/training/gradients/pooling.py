"""Gradients of pools, and of local response normalization (LRN)."""

from __future__ import annotations

from functools import reduce
from math import prod

import numpy as np

from onnxpar.rules.windows import windows
from onnxpar.training.gradients.indexing import scatter_each
from onnxpar.training.gradients.value import Array, Value
from onnxpar.training.gradients.vjp import Grads, Vjp, no_gradient, vjp
from onnxpar.training.gradients.windows import Windows, spread, windows_of


@vjp("MaxPool")
def max_pool(v: Vjp) -> Grads:
    """The gradient rule of MaxPool: the element whose index the op returns gets the gradient. Of
    equal elements in a window, this is the first, as in PyTorch."""
    shape, plane = v.x.shape, prod(v.x.shape[2:])
    at = _in_plane(v.output(1, np.int64, v.y.shape), plane)
    flat = scatter_each(v.dy.reshape(at.shape), at, 2, [*shape[:2], plane])
    if v.attr("storage_order") == 0:
        return [flat.reshape(shape)]
    space = range(2, len(shape))
    return [flat.reshape([*shape[:2], *shape[:1:-1]]).transpose([0, 1, *reversed(space)])]


def _in_plane(indices: Value, plane: int) -> Value:
    """Converts flat indices into a tensor to flat indices into the image of one sample and channel.
    The latter are also valid on a shard of the batch."""
    flat = indices.reshape([*indices.shape[:2], prod(indices.shape[2:])])
    return flat.op("Mod", np.array(plane, np.int64))


@vjp("AveragePool")
def average_pool(v: Vjp) -> Grads:
    by = windows_of(v, v.attr("kernel_shape"))
    counts = _counts(v, by, v.x.shape[2:]).astype(v.dy.dtype)
    return [_spread_evenly(v.dy / v.builder.constant(counts), by)]


def _spread_evenly(dy: Value, by: Windows) -> Value:
    """Adds the gradient of each window to all elements of the window."""
    lone = dy.reshape([dy.shape[0] * dy.shape[1], 1, *dy.shape[2:]])
    ones = dy.builder.constant(np.ones([1, 1, *by.kernel]), dy.dtype)
    wide = spread(lone, ones, by)
    return wide.reshape([*dy.shape[:2], *wide.shape[2:]])


def _counts(v: Vjp, by: Windows, sizes: tuple[int, ...]) -> Array:
    """Returns the divisor of each window: the number of its elements inside the image and, if the
    node counts padding, inside the padding. Elements that `ceil_mode` adds after the padding never
    count."""
    rank = len(sizes)
    pads = [p for dim in windows(v.node, by.kernel).pads for p in dim]
    lines = []
    for i, (size, out) in enumerate(zip(sizes, v.y.shape[2:], strict=True)):
        taps = np.arange(by.kernel[i]) * by.dilations[i] - by.before[i]
        at = np.arange(out)[:, None] * by.strides[i] + taps
        low, high = (pads[2 * i], pads[2 * i + 1]) if v.attr("count_include_pad") else (0, 0)
        counted = ((at >= -low) & (at < size + high)).sum(1)
        lines.append(counted.reshape([-1 if a == i else 1 for a in range(rank)]))
    return np.asarray(reduce(np.multiply, lines))


@vjp("LpPool")
def lp_pool(v: Vjp) -> Grads:
    """The gradient rule of LpPool: zero where a window's norm is zero."""
    by = windows_of(v, v.attr("kernel_shape"))
    power = v.attr("p")
    return [_spread_evenly(_by_norm(v, power), by) * _direction(v.x, power)]


@vjp("GlobalLpPool")
def global_lp_pool(v: Vjp) -> Grads:
    """The gradient rule of GlobalLpPool: zero where a channel's norm is zero."""
    power = v.attr("p")
    return [_by_norm(v, power) * _direction(v.x, power)]


def _by_norm(v: Vjp, power: int) -> Value:
    """Returns the gradient of the result, divided by the norm to the power of `power - 1`; zero
    where the norm is zero."""
    norm = v.y if power == 2 else v.y ** float(power - 1)
    return (v.y > 0.0).where(v.dy / norm, 0.0)


def _direction(x: Value, power: int) -> Value:
    """Returns the derivative of `|x| ** power / power`."""
    if power <= 2:
        return x if power == 2 else x.op("Sign")
    return x * x.op("Abs") ** float(power - 2)


@vjp("GlobalAveragePool")
def global_average_pool(v: Vjp) -> Grads:
    return [(v.dy * (1 / max(prod(v.x.shape[2:]), 1))).expand(v.x.shape)]


@vjp("GlobalMaxPool")
def global_max_pool(v: Vjp) -> Grads:
    """The gradient rule of GlobalMaxPool: the first of equal elements gets the gradient, as in
    PyTorch's adaptive_max_pool."""
    shape, plane = v.x.shape, prod(v.x.shape[2:])
    flat = v.x.reshape([*shape[:2], plane])
    first = flat.op("ArgMax", axis=2, keepdims=1)
    hits = first.equal(np.arange(plane).reshape(1, 1, plane))
    return [hits.where(v.dy.reshape([*shape[:2], 1]), 0.0).reshape(shape)]


@vjp("LRN")
def local_response_normalization(v: Vjp) -> Grads:
    """The gradient rule of LRN: each element gets a gradient as numerator, and through its square
    in the denominators of the channels around it."""
    x, dy = v.x, v.dy
    size, beta, share = v.attr("size"), v.attr("beta"), v.attr("alpha") / v.attr("size")
    before, after = (size - 1) // 2, size // 2
    base = v.attr("bias") + _channel_sums(x * x, before, after) * share
    power = base**-beta
    around = _channel_sums(dy * x * power / base, after, before)
    return [dy * power - x * around * (2 * share * beta)]


def _channel_sums(x: Value, before: int, after: int) -> Value:
    """Returns, for each channel, the sum over `before` channels before it, the channel itself, and
    `after` channels after it."""
    n, c, plane = *x.shape[:2], prod(x.shape[2:])
    ones = x.builder.constant(np.ones((1, 1, before + 1 + after, 1)), x.dtype)
    image = x.reshape([n, 1, c, plane])
    return image.op("Conv", ones, pads=[before, 0, after, 0]).reshape(x.shape)


no_gradient("MaxRoiPool", "its regions are rounded to whole elements; RoiAlign has a gradient")
