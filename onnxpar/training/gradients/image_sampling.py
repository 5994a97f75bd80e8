"""Gradients of ops that sample images at points or in regions, and of Col2Im.

In shapes, n numbers images, c channels, p points, and t the elements around a point (taps).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from onnxpar.base.errors import ModelError
from onnxpar.training.gradients.indexing import scatter_each
from onnxpar.training.gradients.value import Array, Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp

_SHARP = -0.75
"""The coefficient of the cubic kernel, as in onnxruntime and PyTorch."""
_KERNELS = {
    "nearest": np.array([[1.0]]),
    "linear": np.array([[1.0, 0.0], [-1.0, 1.0]]),
    "cubic": np.array(
        [
            [0, 1, 0, 0],
            [_SHARP, 0, -_SHARP, 0],
            [-2 * _SHARP, -_SHARP - 3, 2 * _SHARP + 3, _SHARP],
            [_SHARP, _SHARP + 2, -_SHARP - 2, -_SHARP],
        ]
    ),
}
"""Interpolation kernels by mode: the weight of each tap, a polynomial of the distance from the
point back to the element before it. A row per power, a column per tap."""
_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@vjp("GridSample")
def grid_sample(v: Vjp) -> Grads:
    x, grid = v.operands
    count, channels, *space = x.shape
    points = math.prod(grid.shape[1:-1])
    taps = []
    for axis, size in enumerate(space):
        scale = (size - bool(v.attr("align_corners"))) / 2
        place = grid.shape[-1] - 1 - axis
        at = grid.slice(place, place + 1, -1).reshape([count, points, 1])
        at = at * scale + (size - 1) / 2
        kind = v.attr("mode"), v.attr("padding_mode"), bool(v.attr("align_corners"))
        taps.append(Taps(at, size, *kind, scale))
    samples = Samples(x, taps)
    dy = v.dy.reshape([count, channels, points])
    if taps[0].slope is None:
        return [samples.of_x(dy)]
    of_points = [samples.of_point(dy, axis).unsqueeze([2]) for axis in reversed(range(len(taps)))]
    joined = of_points[0].op("Concat", *of_points[1:], axis=2)
    return samples.of_x(dy), joined.reshape(grid.shape)


class Taps:
    """The elements of one dimension of an image from which each point is interpolated.

    at     the positions of the points in elements, `n p 1`: a coordinate times `scale`, plus a
           constant
    size   the number of elements of the dimension

    The fields are computed from these:

    index   indices of the elements, `n p t`; clipped to the border of the image
    weight  weights of the elements, `n p t`
    slope   derivative of the weights by the coordinate, `n p t`; None if it is zero
    """

    def __init__(
        self,
        at: Value,
        size: int,
        mode: str = "linear",
        padding: str = "zeros",
        is_aligned: bool = False,
        scale: float = 1.0,
    ) -> None:
        kernel, last = _KERNELS[_MODES.get(mode, mode)], float(size - 1)
        base = at.op("Round" if mode == "nearest" else "Floor")
        taps = base + np.arange(len(kernel), dtype=base.dtype) - float(len(kernel) > 2)
        self.weight = _polynomial(kernel, at - base)
        self.slope = None
        if len(kernel) > 1:
            powers = np.arange(len(kernel))[1:, None]
            self.slope = _polynomial(kernel[1:] * powers, at - base) * scale
        if padding == "zeros":
            holds = (taps >= 0.0).op("And", taps <= last)
            self.weight = holds.where(self.weight, 0.0)
            self.slope = self.slope and holds.where(self.slope, 0.0)
        if padding == "reflection" and size > 1:
            taps = _reflected(taps, size, is_aligned)
        self.index = taps.op("Clip", 0.0, last).cast(np.int64)


class Samples:
    """Samples of the images `x`, `n c ..`, at points that are given by their taps in each
    dimension.

    A sample is a weighted sum of the elements around its point. So its gradient is added to these
    elements by their weights, and the gradient of the point's coordinates follows from the slope of
    the weights.
    """

    def __init__(self, x: Value, taps: Sequence[Taps]) -> None:
        self.x, self.taps = x, taps
        self.images, self.channels, *space = x.shape
        at = _joined([t.index for t in taps], space)
        self.points, self.size = at.shape[1:]
        self.flat = [self.images, self.channels, math.prod(space)]
        every = [self.images, self.channels, self.points * self.size]
        self.at = at.reshape([self.images, 1, every[2]]).expand(every)

    @cached_property
    def shares(self) -> Value:
        """The weight of each element in each sample, `n 1 p t`."""
        return _outer([t.weight for t in self.taps]).unsqueeze([1])

    @cached_property
    def picked(self) -> Value:
        """The elements around each point, `n c p t`."""
        elements = self.x.reshape(self.flat).op("GatherElements", self.at, axis=2)
        return elements.reshape([self.images, self.channels, self.points, self.size])

    def of_x(self, dy: Value) -> Value:
        """Returns the gradient of the images; `dy` is the gradient of the samples, `n c p`."""
        terms = (dy.unsqueeze([3]) * self.shares).reshape(self.at.shape)
        return scatter_each(terms, self.at, 2, self.flat).reshape(self.x.shape)

    def of_point(self, dy: Value, axis: int) -> Value:
        """Returns the gradient of the points' coordinate along dimension `axis`, `n p`; `dy` is the
        gradient of the samples, `n c p`."""
        slopes = [t.slope if a == axis else t.weight for a, t in enumerate(self.taps)]
        return ((dy.unsqueeze([3]) * self.picked).sum([1]) * _outer(slopes)).sum([2])


def _reflected(at: Value, size: int, is_aligned: bool) -> Value:
    """Returns positions, reflected into a dimension at the centres of its first and last elements
    (`is_aligned`), or at their outer edges."""
    low, span = (0.0, size - 1) if is_aligned else (-0.5, size)
    away = (at - low).op("Abs")
    away = away - (away / (2.0 * span)).op("Floor") * (2.0 * span)
    inside: Value = (low + span) - (span - away).op("Abs")
    return inside


def _polynomial(coefficients: Array, at: Value) -> Value:
    """Returns the values of polynomials at `at`, one for each column of coefficients; row i has the
    coefficients of power i."""
    rows = coefficients.astype(at.dtype)
    value: Value = at * 0.0 + rows[-1]
    for row in rows[-2::-1]:
        value = value * at + row
    return value


def _outer(shares: Sequence[Value | None]) -> Value:
    """Returns the products of the weights of all dimensions, `n p t`, where t runs over all
    combinations of taps."""
    product, *rest = (s for s in shares if s is not None)
    for share in rest:
        product = _paired(product.unsqueeze([3]) * share.unsqueeze([2]))
    return product


def _joined(indices: Sequence[Value], space: Sequence[int]) -> Value:
    """Returns flat indices into an image with the dimensions `space`, `n p t`, given indices by
    dimension."""
    flat, *rest = indices
    for index, size in zip(rest, space[1:], strict=True):
        moved = (flat * size).unsqueeze([3])
        flat = _paired(moved + index.unsqueeze([2]))
    return flat


def _paired(x: Value) -> Value:
    """Merges the last two dimensions."""
    return x.reshape([*x.shape[:2], x.shape[2] * x.shape[3]])


@vjp("AffineGrid")
def affine_grid(v: Vjp) -> Grads:
    """The gradient rule of AffineGrid. A grid is the product of the transformation with the points
    of an image; the gradient of the transformation is the product of the grid's gradient with these
    points."""
    count, *space, dims = v.y.shape
    identity = v.builder.constant(np.eye(dims, dims + 1)[None], v.x.dtype)
    sizes = np.array([1, 1, *space], np.int64)
    points = identity.op("AffineGrid", sizes, align_corners=v.attr("align_corners"))
    points = points.reshape([math.prod(space), dims])
    ones = v.builder.constant(np.ones([math.prod(space), 1]), v.x.dtype)
    dy = v.dy.reshape([count, math.prod(space), dims])
    return [dy.swap() @ points.op("Concat", ones, axis=1)]


@vjp("RoiAlign")
def roi_align(v: Vjp) -> Grads:
    """The gradient rule of RoiAlign. A region of the result is the product of the image with two
    matrices, for rows and for columns; the gradient is the product with their transposes. The
    coordinates of regions get no gradient, as in torchvision."""
    if v.attr("mode") != "avg":
        raise ModelError(
            f"RoiAlign '{v.node.name}' has no gradient in mode 'max', only in mode 'avg'; export "
            "the model with mode 'avg'"
        )
    images, channels, height, width = v.x.shape
    regions, _, cells, _ = v.dy.shape
    rows, columns = _region_shares(v, 1, height), _region_shares(v, 0, width)
    wide = (v.dy @ columns.unsqueeze([1])).transpose([0, 2, 1, 3])
    numbers = np.arange(images).reshape(1, 1, images, 1)
    owner = v.operands[2].cast(np.int64).reshape([regions, 1, 1, 1]).equal(numbers)
    owned = rows.unsqueeze([2]) * owner.cast(rows.dtype)
    owned = owned.reshape([regions * cells, images * height])
    product = owned.swap() @ wide.reshape([regions * cells, channels * width])
    return [product.reshape([images, height, channels, width]).transpose([0, 2, 1, 3])]


def _region_shares(v: Vjp, axis: int, size: int) -> Value:
    """Returns the weight of each element of an image's dimension (0: columns, 1: rows; of `size`
    elements) in each cell of each region: `region cell element`."""
    rois, dtype = v.operands[1], v.x.dtype
    cells, scale = v.y.shape[3 - axis], v.attr("spatial_scale")
    halves = v.attr("coordinate_transformation_mode") == "half_pixel"
    start, stop = (rois.slice(a, a + 1, 1) * scale for a in (axis, axis + 2))
    extent = stop - start if halves else (stop - start).op("Max", np.array(1, dtype))
    count, most = _samples(v, extent / float(cells))
    start, extent, count = (t.reshape([-1, 1, 1]) for t in (start, extent, count))
    cell = np.arange(cells, dtype=dtype)[:, None]
    sample = np.arange(most, dtype=dtype)
    place = (count * 0.0 + sample + 0.5) / count + cell
    at = start - (0.5 if halves else 0.0) + place * (extent / float(cells))
    holds = (at >= -1.0).op("And", at <= float(size)).op("And", count > sample)
    at = at.op("Clip", 0.0, float(size - 1)).unsqueeze([3])
    shares = 1.0 - (at - np.arange(size, dtype=dtype)).op("Abs")
    shares = shares.op("Relu") * holds.cast(dtype).unsqueeze([3])
    return (shares / count.unsqueeze([3])).sum([2])


def _samples(v: Vjp, cell: Value) -> tuple[Value, int]:
    """Returns the number of samples per cell along a dimension, for each region, and an upper bound
    of these numbers. `cell` is the size of a cell, by region. Errors: ModelError if the numbers
    depend on data."""
    ratio = v.attr("sampling_ratio")
    if ratio:
        return cell * 0.0 + float(ratio), int(ratio)
    rois = v.constant(1)
    if rois is None:
        raise ModelError(
            f"RoiAlign '{v.node.name}' has no gradient, because its number of samples is "
            "data-dependent; set its sampling_ratio"
        )
    largest = float(np.abs(rois[:, 2:] - rois[:, :2]).max(initial=0)) * v.attr("spatial_scale")
    count = cell.op("Ceil").op("Max", np.array(1, cell.dtype))
    return count, max(math.ceil(max(largest, 1) / min(v.y.shape[2:])), 1)


@vjp("Col2Im")
def col2im(v: Vjp) -> Grads:
    """The gradient rule of Col2Im: extracts the blocks from the image's gradient, by a convolution
    with one kernel for each position in a block."""
    block = v.constant(2)
    if block is None:
        raise ModelError(
            f"Col2Im '{v.node.name}' has no gradient, because its block shape is not constant; "
            f"make {v.node.inputs[2].name!r} an initializer of the model"
        )
    channels, places = v.y.shape[1], math.prod(block)
    kernel = np.eye(places, dtype=v.dy.dtype).reshape(places, 1, *block)
    kernel = np.tile(kernel, [channels] + [1] * (kernel.ndim - 1))
    attrs = {k: v.attr(k) for k in ("dilations", "pads", "strides") if v.attr(k)}
    return [v.dy.op("Conv", kernel, group=channels, **attrs).reshape(v.x.shape)]
