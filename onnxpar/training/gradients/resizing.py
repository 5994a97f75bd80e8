"""Gradients of ops that resize images, or crop and pad them around the centre."""

from __future__ import annotations

import numpy as np

from onnxpar.base.errors import ModelError
from onnxpar.rules.interpolation import Taps, taps
from onnxpar.rules.resizing import scalings
from onnxpar.training.gradients.movement import along
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@vjp("Resize")
def resize(v: Vjp) -> Grads:
    """The gradient rule of Resize, which is a weighted sum along each resized dimension, that is, a
    product with a matrix; the gradient is the product with the transpose."""
    if v.y.size == 0 or v.x.size == 0:
        return [v.x.builder.zeros(v.x.shape, v.x.dtype)]
    resized = scalings(v.node)
    if resized is None:
        raise ModelError(
            f"Resize '{v.node.name}' has no gradient, because its scales or its region are not "
            "constant; make them initializers of the model"
        )
    gradient = v.dy
    for axis, scaling in resized.items():
        elements = taps(scaling)
        times, rest = divmod(scaling.out, scaling.size)
        shares = _shares(elements, scaling.size)
        if not rest and np.array_equal(shares, np.eye(scaling.size).repeat(times, 0)):
            shape = [*gradient.shape[:axis], scaling.size, times, *gradient.shape[axis + 1 :]]
            gradient = gradient.reshape(shape).sum([axis + 1])
        else:
            gradient = along(gradient, axis, shares)
    return [gradient]


def _shares(elements: Taps, size: int) -> np.ndarray:
    """Returns the matrix by which a Resize multiplies a dimension of `size` elements: a row per
    result, a column per element."""
    shares = np.zeros((len(elements.index), size))
    np.add.at(shares, (np.arange(len(shares))[:, None], elements.index), elements.weight)
    shares[elements.outside] = 0
    return shares


@vjp("CenterCropPad")
def center_crop_pad(v: Vjp) -> Grads:
    """The gradient rule of CenterCropPad: pads where the op cropped, and crops where it padded. If
    the difference is odd, the extra element is at the end."""
    before, after = [], []
    for size, out in zip(v.x.shape, v.y.shape, strict=True):
        missing = size - out
        first = missing // 2 if missing > 0 else -(-missing // 2)
        before.append(first)
        after.append(missing - first)
    return [v.dy.pad(before, after)]
