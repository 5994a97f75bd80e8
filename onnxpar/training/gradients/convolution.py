"""Gradients of Conv and ConvTranspose."""

from __future__ import annotations

from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, no_gradient, vjp
from onnxpar.training.gradients.windows import correlate, gather, spread, windows_of


@vjp("Conv", trained=(1, 2))
def conv(v: Vjp) -> Grads:
    x, weight = v.operands[:2]
    by, group = windows_of(v, weight.shape[2:]), v.attr("group")
    return spread(v.dy, weight, by, group), correlate(x, v.dy, by, group), _of_bias(v)


@vjp("ConvTranspose", trained=(1, 2))
def conv_transpose(v: Vjp) -> Grads:
    x, weight = v.operands[:2]
    by, group = windows_of(v, weight.shape[2:]), v.attr("group")
    return gather(v.dy, weight, by, group), correlate(v.dy, x, by, group), _of_bias(v)


def _of_bias(v: Vjp) -> Value:
    return v.dy.sum([0, *range(2, v.dy.rank)])


no_gradient("ConvInteger QLinearConv", "its operands are integers")
