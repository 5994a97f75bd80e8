"""Gradients of convolutions that sample their images at points of their own."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from onnxpar.grad.sampling import Samples, Taps
from onnxpar.grad.value import Array, Value
from onnxpar.grad.vjp import Grads, Vjp, vjp


@vjp("DeformConv", trained=(1, 3))
def deform_conv(v: Vjp) -> Grads:
    """A product of the weights with samples, which a mask scales."""
    net = _Deformed(v)
    samples, weight = net.samples, net.weight
    dy = v.dy.reshape([net.count, net.groups, -1, net.places])
    of_columns = net.as_points(weight.swap() @ dy)
    of_samples = of_columns if net.mask is None else of_columns * net.mask
    of_offsets = [samples.of_point(of_samples, a) for a in range(len(net.space))]
    split = [net.count, net.shared, net.taps, 1, net.places]
    first, *others = (o.reshape(split) for o in of_offsets)
    of_offset = first.op("Concat", *others, axis=3).reshape(v.operands[2].shape)
    of_mask = None
    if net.mask is not None:
        of_mask = (of_columns * net.sampled).sum([1]).reshape(v.operands[4].shape)
    of_bias = v.dy.sum([0, *range(2, v.dy.rank)])
    return samples.of_x(of_samples).reshape(v.x.shape), net.of_weight(dy), of_offset, of_bias, of_mask


class _Deformed:
    """The samples of a DeformConv and what it makes of them.

    groups of channels have weights of their own, `shared` ones offsets of their own; there are
    `taps` in a window, and `places` of it.
    """

    def __init__(self, v: Vjp) -> None:
        self.v = v
        self.count, self.channels, *self.space = v.x.shape
        self.kernel, self.out = v.operands[1].shape[2:], v.y.shape[2:]
        self.groups, self.shared = v.attr("group"), v.attr("offset_group")
        self.taps, self.places = math.prod(self.kernel), math.prod(self.out)
        depth = v.operands[1].shape[1] * self.taps
        self.weight = v.operands[1].reshape([self.groups, -1, depth])
        mask = v.operand(4)
        points = [self.count * self.shared, 1, self.taps * self.places]
        self.mask = None if mask is None else mask.reshape(points)

    @cached_property
    def samples(self) -> Samples:
        """Of the images of all channels that share offsets, `(n s) c (k p)`."""
        count, points = self.count * self.shared, self.taps * self.places
        offset = self.v.operands[2].reshape([count, self.taps, len(self.space), self.places])
        taps = []
        for axis, size in enumerate(self.space):
            moved = offset.slice(axis, axis + 1, 2).reshape([count, self.taps, self.places])
            at = moved + self._regular(axis).astype(moved.dtype)
            taps.append(Taps(at.reshape([count, points, 1]), size))
        channels = self.channels // self.shared
        return Samples(self.v.x.reshape([count, channels, *self.space]), taps)

    def _regular(self, axis: int) -> Array:
        """Where the taps of all windows are along an axis without offsets, `k p`."""
        rank = len(self.space)
        stride = (self.v.attr("strides") or [1] * rank)[axis]
        dilation = (self.v.attr("dilations") or [1] * rank)[axis]
        before = (self.v.attr("pads") or [0] * rank)[axis]
        tap = np.indices(self.kernel)[axis].reshape(-1, 1)
        return tap * dilation + np.indices(self.out)[axis].reshape(1, -1) * stride - before

    @cached_property
    def sampled(self) -> Value:
        """The images at the points, `(n s) c (k p)`."""
        return (self.samples.picked * self.samples.shares).sum([3])

    def as_points(self, columns: Value) -> Value:
        """Columns, `n g (c k) p`, as points."""
        channels = self.channels // self.shared
        return columns.reshape([self.count * self.shared, channels, self.taps * self.places])

    def of_weight(self, dy: Value) -> Value:
        """The gradient of the weights: a product over all images and places."""
        columns = self.sampled if self.mask is None else self.sampled * self.mask
        columns = columns.reshape([self.count, self.groups, -1, self.places])
        dy, columns = (
            t.transpose([1, 0, 3, 2]).reshape([self.groups, -1, t.shape[2]]) for t in (dy, columns)
        )
        return (dy.swap() @ columns).reshape(self.v.operands[1].shape)
