"""Gradients of deformable convolutions, which sample their images at computed points."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from onnxpar.training.gradients.image_sampling import Samples, Taps
from onnxpar.training.gradients.value import Array, Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@vjp("DeformConv", trained=(1, 3))
def deform_conv(v: Vjp) -> Grads:
    """The gradient rule of DeformConv, which is a product of the weights with samples of the image
    that a mask scales; the gradient follows from both."""
    net = _Deformed(v)
    samples, rows = net.samples, net.by_row(v.dy, net.weight.shape[1])
    of_columns = net.as_points(rows @ net.weight)
    of_samples = of_columns if net.mask is None else of_columns * net.mask
    of_offsets = [samples.of_point(of_samples, a) for a in range(len(net.space))]
    split = [net.count, net.shared, net.taps, 1, net.places]
    first, *others = (o.reshape(split) for o in of_offsets)
    of_offset = first.op("Concat", *others, axis=3).reshape(v.operands[2].shape)
    of_mask = None
    if net.mask is not None:
        of_mask = (of_columns * net.sampled).sum([1]).reshape(v.operands[4].shape)
    of_bias = v.dy.sum([0, *range(2, v.dy.rank)])
    of_x = samples.of_x(of_samples).reshape(v.x.shape)
    return of_x, net.of_weight(rows), of_offset, of_bias, of_mask


class _Deformed:
    """The operands of a DeformConv and its samples of the image, and conversions between their
    shapes. In shapes such as `(n s) c (k p)`, letters in parentheses are merged into one dimension.

    groups  number of groups of channels, each with its own weights (g)
    shared  number of groups of channels, each with its own offsets (s)
    taps    number of elements in a window (k)
    places  number of windows (p)
    """

    def __init__(self, v: Vjp) -> None:
        self.v = v
        self.count, self.channels, *self.space = v.x.shape
        self.kernel, self.out = v.operands[1].shape[2:], v.y.shape[2:]
        self.groups, self.shared = v.attr("group"), v.attr("offset_group")
        self.taps, self.places = math.prod(self.kernel), math.prod(self.out)
        width, depth = v.operands[1].shape[0] // self.groups, self.channels // self.groups
        self.weight = v.operands[1].reshape([self.groups, width, depth * self.taps])
        mask = v.operand(4)
        points = [self.count * self.shared, 1, self.taps * self.places]
        self.mask = None if mask is None else mask.reshape(points)

    @cached_property
    def samples(self) -> Samples:
        """The samples of the image, `(n s) c (k p)`: each group s of channels that share offsets
        counts as an image."""
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
        """Returns the positions of the taps of all windows along an axis, without offsets: `k
        p`."""
        rank = len(self.space)
        stride = (self.v.attr("strides") or [1] * rank)[axis]
        dilation = (self.v.attr("dilations") or [1] * rank)[axis]
        before = (self.v.attr("pads") or [0] * rank)[axis]
        tap = np.indices(self.kernel)[axis].reshape(-1, 1)
        window = np.indices(self.out)[axis].reshape(1, -1)
        return np.asarray(tap * dilation + window * stride - before)

    @cached_property
    def sampled(self) -> Value:
        """The interpolated values at the sample points, `(n s) c (k p)`."""
        return (self.samples.picked * self.samples.shares).sum([3])

    def by_row(self, x: Value, depth: int) -> Value:
        """Reshapes a tensor to one row for each group, image and window: `g (n p) depth`, where
        `depth` is the size of a row."""
        x = x.reshape([self.count, self.groups, depth, self.places]).transpose([1, 0, 3, 2])
        return x.reshape([self.groups, self.count * self.places, depth])

    def as_points(self, rows: Value) -> Value:
        """Reshapes rows of samples to `(n s) c (k p)`: the inverse of `by_row`."""
        x = rows.reshape([self.groups, self.count, self.places, self.weight.shape[2]])
        channels = self.channels // self.shared
        points = [self.count * self.shared, channels, self.taps * self.places]
        return x.transpose([1, 0, 3, 2]).reshape(points)

    def of_weight(self, rows: Value) -> Value:
        """Returns the gradient of the weights: a matrix product that sums over all images and
        windows. `rows` has the gradient of the result by row."""
        columns = self.sampled if self.mask is None else self.sampled * self.mask
        product = rows.swap() @ self.by_row(columns, self.weight.shape[2])
        return product.reshape(self.v.operands[1].shape)
