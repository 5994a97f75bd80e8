"""Gradients of ops that select elements by index or by order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError
from onnxpar.graph.stop_gradient import padding_row
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


def scatter_add(dy: Value, indices: Value, axis: int, shape: Sequence[int]) -> Value:
    """Returns a tensor of zeros to which the slices of `dy` along an axis are added at the
    positions `indices`, a vector.

    Adds element by element, because onnxruntime's ScatterND adds slices with equal indices wrongly.
    """
    axis %= dy.rank
    at = indices.reshape([-1 if a == axis else 1 for a in range(dy.rank)])
    return scatter_each(dy, at, axis, shape)


def scatter_each(dy: Value, indices: Value, axis: int, shape: Sequence[int]) -> Value:
    """Like `scatter_add`, but with an index for each element of `dy` instead of each slice.
    `indices` is broadcast to the shape of `dy`."""
    wide = dy.wide()  # onnxruntime cannot add 16-bit floats
    zeros = dy.builder.zeros(shape, wide.dtype)
    at = indices.expand(dy.shape)
    return zeros.op("ScatterElements", at, wide, axis=axis, reduction="add").cast(dy.dtype)


def without_padding(gather: gs.Node, indices: Value, dy: Value) -> Value:
    """Returns `dy`, the gradient of the rows that a Gather looks up, with zeros for lookups of the
    row that is not trained (torch's `padding_idx`), if there is one."""
    row = padding_row(gather)
    if row is None:
        return dy
    rows = gather.inputs[0].shape[0]  # from which negative indices count
    counts = indices.equal(row).op("Or", indices.equal(row - rows)).op("Not")
    return counts.reshape([*counts.shape, *[1] * (dy.rank - counts.rank)]).where(dy, 0.0)


@vjp("Gather", trained=(0,))
def gather(v: Vjp) -> Grads:
    x, indices = v.operands
    axis, count = v.attr("axis") % x.rank, indices.size
    dy = without_padding(v.node, indices, v.dy)
    rows = dy.reshape([*x.shape[:axis], count, *x.shape[axis + 1 :]])
    places, size = v.constant(1), x.shape[axis]
    if places is not None and count:
        at = places.reshape(-1) % size
        if (np.diff(at) == 1).all():  # consecutive
            before, after = [0] * x.rank, [0] * x.rank
            before[axis], after[axis] = int(at[0]), int(size - 1 - at[-1])
            return [rows.pad(before, after)]
        if count == size and len({*at.tolist()}) == size:  # a permutation
            return [rows.op("Gather", np.argsort(at), axis=axis)]
    return [scatter_add(rows, indices.reshape([count]), axis, x.shape)]


@vjp("GatherElements")
def gather_elements(v: Vjp) -> Grads:
    return [scatter_each(v.dy, v.operands[1], v.attr("axis"), v.x.shape)]


@vjp("GatherND", trained=(0,))
def gather_nd(v: Vjp) -> Grads:
    x, indices = v.operands
    batch = v.attr("batch_dims")
    depth = batch + indices.shape[-1]
    at = linear(indices, x.shape[batch:depth])
    rows = [*x.shape[:batch], at.size // math.prod(x.shape[:batch] or [1]) if at.size else 0]
    picked = v.dy.reshape([*rows, *x.shape[depth:]])
    merged = [*x.shape[:batch], math.prod(x.shape[batch:depth]), *x.shape[depth:]]
    at = at.reshape([*rows, *[1] * (x.rank - depth)])
    return [scatter_each(picked, at, batch, merged).reshape(x.shape)]


def linear(indices: Value, sizes: Sequence[int]) -> Value:
    """Returns flat indices into a tensor of these sizes. `indices` has tuples of indices along its
    last dimension: (1, 2) in [3, 4] is 6."""
    if len(sizes) == 1:
        return indices.reshape(indices.shape[:-1])
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    counted = (indices < 0).where(indices + np.array(sizes, np.int64), indices)
    return (counted * np.array(strides, np.int64)).sum([-1])


@vjp("TopK")
def top_k(v: Vjp) -> Grads:
    """The gradient rule of TopK: the elements that the op selected get the gradient. Its second
    result has their indices."""
    at = v.output(1, np.int64, v.y.shape)
    return [scatter_each(v.dy, at, v.attr("axis"), v.x.shape)]


@vjp("Compress")
def compress(v: Vjp) -> Grads:
    """The gradient rule of Compress: each slice of the gradient goes back to the position from
    which the op took it."""
    x, condition, axis = v.x, v.operands[1], v.attr("axis")
    if v.y.size == 0:
        return [x.builder.zeros(x.shape, x.dtype)]
    whole = x.shape if axis is not None else (x.size,)
    axis = 0 if axis is None else axis % x.rank
    condition = condition.cast(np.int64).pad([0], [whole[axis] - condition.size])
    order = condition.op("CumSum", np.array(0, np.int64))
    last = condition.builder.constant(v.y.shape[axis] - 1, np.int64)
    rows = v.dy.op("Gather", (order - 1).op("Min", last).op("Max", 0), axis=axis)
    holds = condition.cast(np.bool_).reshape([-1 if a == axis else 1 for a in range(len(whole))])
    return [holds.where(rows, 0.0).reshape(x.shape)]


@vjp("MaxUnpool")
def max_unpool(v: Vjp) -> Grads:
    return [v.dy.reshape([v.y.size]).op("Gather", v.operands[1], axis=0)]


@vjp("Trilu")
def trilu(v: Vjp) -> Grads:
    return [v.dy.op("Trilu", v.operand(1), upper=v.attr("upper"))]


@vjp("ReverseSequence")
def reverse_sequence(v: Vjp) -> Grads:
    axes = {name: v.attr(name) for name in ("batch_axis", "time_axis")}
    return [v.dy.op("ReverseSequence", v.operands[1], **axes)]


@vjp("CumSum")
def cumulative_sum(v: Vjp) -> Grads:
    exclusive, backwards = v.attr("exclusive"), v.attr("reverse")
    return [v.dy.op("CumSum", v.operands[1], exclusive=exclusive, reverse=1 - backwards)]


@vjp("CumProd")
def cumulative_product(v: Vjp) -> Grads:
    """The gradient rule of CumProd. The gradient of element i is the product of the elements before
    it, times s[i] = dy[i] + x[i + 1] s[i + 1]. The recurrence is computed by doubling spans of 1,
    2, 4, ... elements, without a division, so elements may be 0."""
    axis = v.constant(1)
    if axis is None:
        raise ModelError(
            f"CumProd '{v.node.name}' has no gradient, because its axis is not constant; make the "
            "axis a constant"
        )
    at, backwards = int(axis.reshape(-1)[0]) % v.x.rank, v.attr("reverse")
    size = v.x.shape[at]

    def moved(x: Value, by: int) -> Value:
        """Returns the elements, shifted by `by` positions towards the front, with zeros at the
        end."""
        if by >= size:
            return x.builder.zeros(x.shape, x.dtype)
        ends = [[-by * (a == at) for a in range(x.rank)], [by * (a == at) for a in range(x.rank)]]
        return x.pad(*(ends[::-1] if backwards else ends))

    factor, total = moved(v.x, 1), moved(v.dy, 1) if v.attr("exclusive") else v.dy
    span = 1
    while span < size:
        total = total + factor * moved(total, span)
        factor = factor * moved(factor, span)
        span *= 2
    return [total * v.x.op("CumProd", v.operands[1], exclusive=1, reverse=backwards)]
