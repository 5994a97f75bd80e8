"""Gradients of ops that create tensors from a few numbers."""

from __future__ import annotations

import numpy as np

from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@vjp("OneHot")
def one_hot(v: Vjp) -> Grads:
    """The gradient rule of OneHot: only the operand with the two values (off, on) has a
    gradient."""
    indices, depth = v.operands[:2]
    hot = indices.op("OneHot", depth, np.array([0, 1], v.dy.dtype), axis=v.attr("axis"))
    off, on = (v.dy * (1.0 - hot)).sum(), (v.dy * hot).sum()
    return None, None, off.reshape([1]).op("Concat", on.reshape([1]), axis=0)


@vjp("Range")
def range_(v: Vjp) -> Grads:
    steps = np.arange(v.dy.size, dtype=v.dy.dtype)
    return v.dy.sum(), None, (v.dy * steps).sum()


@vjp("EyeLike RandomNormalLike RandomUniformLike Bernoulli")
def no_slope(v: Vjp) -> Grads:
    """The gradient rule of ops without a gradient: their results depend only on the operand's
    shape, or are a step function of the operand."""
    return []
