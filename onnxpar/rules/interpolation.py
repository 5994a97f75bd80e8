"""Computes, for each element of a resized dimension, from which elements a Resize interpolates it,
and with what weights.

The arithmetic is float32 in the same order as in onnxruntime, so that both choose the same one of
two equally near neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array

F = np.float32
HALF = F(0.5)
_TIE = 1e-6
"""Tolerance of onnxruntime for a coordinate halfway between two elements."""


@dataclass(frozen=True)
class Scaling:
    """The resizing of one dimension from `size` to `out` elements.

    scale   the factor from elements to results: 2.0 doubles the dimension
    mode    nearest, linear or cubic
    attrs   the node's attributes
    region  the cropped part, as fractions of the dimension
    """

    size: int
    out: int
    scale: float
    mode: str
    attrs: Mapping[str, Any] = field(default_factory=dict)
    region: tuple[float, float] = (0.0, 1.0)

    @property
    def transformation(self) -> str:
        """The name of the function that maps positions in the result to coordinates in the
        operand."""
        return str(self.attrs.get("coordinate_transformation_mode", "half_pixel"))


@dataclass(frozen=True, eq=False)
class Taps:
    """Where the elements of a resized dimension come from.

    index    a row of operand positions for each element of the result
    weight   their weights, in the same shape
    outside  True for each element of the result that lies outside the operand
    """

    index: Array
    weight: Array
    outside: Array


def taps(scaling: Scaling) -> Taps:
    """Returns the operand positions and weights of every element along the resized dimension."""
    at = coordinates(scaling)
    outside = np.zeros(scaling.out, np.bool_)
    if scaling.transformation == "tf_crop_and_resize":
        outside = (at < 0) | (at > scaling.size - 1)
    smooths = scaling.mode != "nearest" and scaling.attrs.get("antialias", 0)
    index, weight = (_smooth if smooths else _KINDS[scaling.mode])(scaling, at)
    return Taps(np.clip(index, 0, scaling.size - 1), weight.astype(F), outside)


def coordinates(scaling: Scaling) -> Array:
    """Returns the coordinate (float32) in the operand of each element along the resized
    dimension."""
    at, scale = np.arange(scaling.out, dtype=F), F(scaling.scale)
    size, out = F(scaling.size), F(scaling.out)
    how = scaling.transformation
    if how == "asymmetric":
        return np.asarray(at / scale)
    if how == "tf_half_pixel_for_nn":
        return np.asarray((at + HALF) / scale)
    if how == "align_corners":
        return at * (size - 1) / (out - 1) if out > 1 else at * 0
    if how == "tf_crop_and_resize":
        start, end = map(F, scaling.region)
        if out <= 1:
            return np.full(scaling.out, HALF * (start + end) * (size - 1), F)
        return np.asarray(start * (size - 1) + at * (end - start) * (size - 1) / (out - 1))
    if how == "half_pixel_symmetric":  # onnxruntime divides in float64 here
        offset = np.float64(size / 2 * (1 - out / (scale * size)))
        return np.asarray(offset + (at + 0.5) / np.float64(scale) - 0.5).astype(F)
    return at * 0 if how == "pytorch_half_pixel" and out <= 1 else (at + HALF) / scale - HALF


def _nearest(scaling: Scaling, at: Array) -> tuple[Array, Array]:
    """Returns (positions, weights) of the single nearest element for each coordinate in `at`."""
    mode = scaling.attrs.get("nearest_mode", "round_prefer_floor")
    index = _ROUNDINGS[mode](at).astype(np.int64)[:, None]
    return index, np.ones(index.shape, F)


def _rounded(at: Array, up: bool) -> Array:
    """Returns the nearest integers; halfway between two (up to onnxruntime's tolerance), the upper
    one if `up`, else the lower one."""
    low = np.floor(at)
    share = (at - low).astype(np.float64)
    return low + np.where(np.abs(share - 0.5) < _TIE, up, share > 0.5)


_ROUNDINGS: Mapping[str, Callable[[Array], Array]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": partial(_rounded, up=False),
    "round_prefer_ceil": partial(_rounded, up=True),
}


def _linear(scaling: Scaling, at: Array) -> tuple[Array, Array]:
    """Returns (positions, weights) of the two elements around each coordinate in `at`."""
    at = np.clip(at, 0, F(scaling.size - 1))
    low = np.floor(at)
    share = at - low
    index = np.stack([low, low + 1], 1).astype(np.int64)
    return index, np.stack([1 - share, share], 1)


def _cubic(scaling: Scaling, at: Array) -> tuple[Array, Array]:
    """Returns (positions, weights) of the four elements around each coordinate in `at`."""
    low = np.floor(at)
    index = low[:, None].astype(np.int64) + np.arange(-1, 3)
    weight = _cubic_filter(np.arange(-1, 3, dtype=F) - (at - low)[:, None], scaling)
    if scaling.attrs.get("exclude_outside", 0):
        weight = np.where((index < 0) | (index >= scaling.size), 0, weight)
        weight = weight / weight.sum(1, keepdims=True)
    return index, weight


def _cubic_filter(x: Array, scaling: Scaling) -> Array:
    """Returns the values at `x` of Keys's cubic convolution kernel, which is 0 beyond a distance of
    2."""
    a, x = F(scaling.attrs.get("cubic_coeff_a", -0.75)), np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.asarray(np.where(x <= 1, near, np.where(x < 2, far, 0)))


def _linear_filter(x: Array, scaling: Scaling) -> Array:
    """Returns the values at `x` of the triangle kernel of linear interpolation."""
    return np.asarray(np.maximum(1 - np.abs(x), 0))


_FILTERS = {"linear": (_linear_filter, 1), "cubic": (_cubic_filter, 2)}


def _smooth(scaling: Scaling, at: Array) -> tuple[Array, Array]:
    """Returns (positions, weights) for `antialias`: the filter widens as the dimension shrinks.
    `at` are the results of `coordinates`."""
    kernel, reach = _FILTERS[scaling.mode]
    grown = max(F(1) / F(scaling.scale), F(1))
    centre = at + HALF
    first, end = (np.floor(centre + side * grown * reach + HALF) for side in (-1, 1))
    index = first[:, None].astype(np.int64) + np.arange(int((end - first).max()))
    weight = kernel((index - centre[:, None] + HALF) / grown, scaling)
    weight = np.where(index < end[:, None], weight, 0)
    if scaling.attrs.get("exclude_outside", 0):
        weight = np.where((index < 0) | (index >= scaling.size), 0, weight)
    return index, weight / weight.sum(1, keepdims=True)


_KINDS = {"nearest": _nearest, "linear": _linear, "cubic": _cubic}
