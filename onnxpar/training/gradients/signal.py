"""Gradients of Fourier transforms, which are Fourier transforms themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxpar.base.errors import ModelError
from onnxpar.training.gradients.indexing import scatter_add
from onnxpar.training.gradients.value import Array, Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@vjp("DFT")
def dft(v: Vjp) -> Grads:
    """The gradient rule of DFT: the transform of the gradient in the opposite direction, scaled by
    the length."""
    x, dy, axis = v.x, v.dy, _axis(v)
    inverse, onesided = v.attr("inverse"), v.attr("onesided")
    if inverse and onesided:
        size = dy.shape[axis]
        if x.shape[axis] != size // 2 + 1:
            raise ModelError(
                f"DFT '{v.node.name}' computes {size} elements from {x.shape[axis]} frequencies "
                f"instead of {size // 2 + 1}: runtimes do not agree on the result, so it has no "
                f"gradient; give it a dft_length of {2 * (x.shape[axis] - 1)}"
            )
        twice = np.full(size // 2 + 1, 2.0)  # a frequency also stands for its mirror image
        twice[[0, size // 2] if size % 2 == 0 else [0]] = 1
        shape = [-1 if a == axis else 1 for a in range(dy.rank)]
        shares = (twice / size).reshape(shape).astype(dy.dtype)
        return [_transformed(dy, axis, onesided=1) * shares]
    length = _constant(v, 1)
    size = x.shape[axis] if length is None else int(length.reshape(()))
    gradient = _transformed(_fit(dy, axis, size), axis, inverse=1 - inverse)
    gradient = gradient * (1 / size if inverse else size)
    return [_fit(gradient, axis, x.shape[axis]).slice(0, x.shape[-1], x.rank - 1)]


@vjp("STFT")
def stft(v: Vjp) -> Grads:
    """The gradient rule of STFT: the gradient of the signal adds up the gradients of overlapping
    frames."""
    step, length = _constant(v, 1), _constant(v, 3)
    window = v.operand(2)
    count, total, *rest = v.x.shape
    parts = rest[0] if rest else 1
    size = total if window is None else window.shape[0]
    size = size if length is None else int(length.reshape(()))
    assert step is not None, "not optional"
    framed = _transformed(_fit(v.dy, 2, size), 2, inverse=1) * size
    framed = framed.slice(0, parts, 3)
    frames = v.dy.shape[1]
    places = np.arange(frames)[:, None] * int(step.reshape(())) + np.arange(size)
    weighted = framed if window is None else framed * window.reshape([size, 1])
    rows = weighted.reshape([count, frames * size, parts])
    at = v.builder.constant(places.reshape(-1), np.int64)
    signal = scatter_add(rows, at, 1, [count, total, parts]).reshape(v.x.shape)
    if window is None:
        return [signal]
    read = v.x.reshape([count, total, parts]).op("Gather", places, axis=1)
    return signal, None, (framed * read).sum([0, 1, 3])


def _axis(v: Vjp) -> int:
    """Returns the dimension that a DFT transforms."""
    if v.builder.graph.opset < 20:
        return int(v.attr("axis")) % v.x.rank
    axis = _constant(v, 2)
    return (-2 if axis is None else int(axis.reshape(()))) % v.x.rank


def _constant(v: Vjp, index: int) -> Array | None:
    """Returns the value of an operand; None if it is missing. Errors: ModelError if it is not
    constant."""
    value = v.constant(index)
    if value is None and v.operand(index) is not None:
        raise ModelError(
            f"{v.node.op} '{v.node.name}' has no gradient, because its operand {index} is not "
            f"constant; make {v.node.inputs[index].name!r} an initializer of the model"
        )
    return value


def _transformed(x: Value, axis: int, **attrs: Any) -> Value:
    """Returns the DFT along one dimension."""
    if x.builder.graph.opset < 20:
        return x.op("DFT", axis=axis, **attrs)
    return x.op("DFT", None, np.array(axis, np.int64), **attrs)


def _fit(x: Value, axis: int, size: int) -> Value:
    """Pads a dimension with zeros at its end, or cuts it, to `size` elements."""
    missing = [size - x.shape[a] if a == axis else 0 for a in range(x.rank)]
    return x.pad([0] * x.rank, missing)
