"""Gradients of ops that only move elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxpar.base.errors import ModelError
from onnxpar.training.gradients.indexing import scatter_add
from onnxpar.training.gradients.value import Array, Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@vjp("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(v: Vjp) -> Grads:
    return [v.dy.reshape(v.x.shape)]


@vjp("Transpose")
def transpose(v: Vjp) -> Grads:
    perm = v.attr("perm") or list(reversed(range(v.x.rank)))
    return [v.dy.transpose([int(p) for p in np.argsort(perm)])]


@vjp("Expand")
def expand(v: Vjp) -> Grads:
    return [v.dy]


@vjp("Concat")
def concat(v: Vjp) -> Grads:
    axis = v.attr("axis")
    sizes = [x.shape[axis] for x in v.operands]
    return _parts(v.dy, sizes, axis)


def _parts(dy: Value, sizes: list[int], axis: int) -> list[Value]:
    """Splits a tensor along a dimension into parts of these sizes."""
    if len(sizes) == 1:
        return [dy]
    return dy.builder.add_each("Split", [dy, np.array(sizes, np.int64)], len(sizes), axis=axis)


@vjp("Split")
def split(v: Vjp) -> Grads:
    parts = [v.gradient(i) for i in range(len(v.node.outputs))]
    return [parts[0].op("Concat", *parts[1:], axis=v.attr("axis") or 0)]


@vjp("Slice")
def slice_(v: Vjp) -> Grads:
    """The gradient rule of Slice: each element of the gradient goes back to its position; elements
    that the slice left out get zero."""
    x, gradient = v.x, v.dy
    starts, stops, axes, steps = (v.constant(i) for i in range(1, 5))
    if v.y.size == 0:
        return [x.builder.zeros(x.shape, x.dtype)]
    if starts is None or stops is None or (steps is None and v.operand(4) is not None):
        return [_computed_slice(v, gradient)]
    before, after = [0] * x.rank, [0] * x.rank
    for i, axis in enumerate(range(len(starts)) if axes is None else axes):
        size, step = x.shape[axis], 1 if steps is None else int(steps[i])
        places = _places(int(starts[i]), int(stops[i]), step, size)
        gradient = _spread(gradient, int(axis) % x.rank, places)
        before[axis], after[axis] = min(places), size - 1 - max(places)
    return [gradient.pad(before, after)]


def _places(start: int, stop: int, step: int, size: int) -> range:
    """Returns the positions that a slice takes from a dimension of `size` elements."""
    low, high = (0, size) if step > 0 else (-1, size - 1)
    start, stop = (n + size if n < 0 else n for n in (start, stop))
    return range(min(max(start, 0), high), min(max(stop, low), high), step)


def _computed_slice(v: Vjp, gradient: Value) -> Value:
    """Returns the gradient of a slice whose bounds depend on data, but whose number of elements is
    known. Errors: ModelError if the axes are not constant."""
    starts, axes, steps = v.operands[1], v.constant(3), v.operand(4)
    if axes is None and v.operand(3) is not None:
        raise ModelError(
            f"{v.node.op} '{v.node.name}' has no gradient, because its axes are not constant; make "
            f"{v.node.inputs[3].name!r} an initializer of the model"
        )
    for i, axis in enumerate(range(starts.size) if axes is None else axes):
        size, count = v.x.shape[axis], v.y.shape[axis]
        start = starts.slice(i, i + 1, 0)
        start = (start < 0).where(start + size, start).op("Clip", 0, size - 1)
        order = start.builder.constant(np.arange(count), start.dtype)
        at = start + (order if steps is None else order * steps.slice(i, i + 1, 0))
        shape = [*gradient.shape]
        shape[axis] = size
        gradient = scatter_add(gradient, at, int(axis), shape)
    return gradient


def _spread(dy: Value, axis: int, places: range) -> Value:
    """Returns the elements of `dy` in ascending order of position, with zeros between them for
    skipped positions: the gradient of a Slice that took the positions `places` of dimension `axis`,
    apart from the ends."""
    step = abs(places.step)
    if places.step < 0:
        last, end = np.array([-1], np.int64), np.array([np.iinfo(np.int64).min], np.int64)
        dy = dy.op("Slice", last, end, np.array([axis], np.int64), last)
    if step == 1 or len(places) == 1:
        return dy
    wide = dy.unsqueeze([axis + 1]).pad([0] * (dy.rank + 1), _only(axis + 1, step - 1, dy.rank + 1))
    shape = list(dy.shape)
    shape[axis] *= step
    return wide.reshape(shape).slice(0, shape[axis] - (step - 1), axis)


def _only(axis: int, amount: int, rank: int) -> list[int]:
    """Returns a list of `rank` numbers: `amount` at `axis`, else 0."""
    return [amount if a == axis else 0 for a in range(rank)]


@vjp("Pad")
def pad(v: Vjp) -> Grads:
    """The gradient rule of Pad: the gradient of the padding goes to the fill value or, in other
    modes, to the elements that were copied there."""
    x, mode = v.x, v.attr("mode")
    amounts, axes = v.constant(1), v.constant(3)
    if amounts is None or (axes is None and v.operand(3) is not None):
        raise ModelError(
            f"{v.node.op} '{v.node.name}' has no gradient, because its pads are not constant; make "
            f"{v.node.inputs[1].name!r} and the axes initializers of the model"
        )
    before, after = [0] * x.rank, [0] * x.rank
    ends = amounts.reshape(2, -1).tolist()
    for axis, b, a in zip(range(x.rank) if axes is None else axes, *ends, strict=True):
        before[axis], after[axis] = b, a
    if mode != "constant":
        return [_folded(v.dy, x.shape, before, after, mode)]
    inner = v.dy.pad([-b for b in before], [-a for a in after])
    return inner, None, _border(v.dy, before, after)


def _border(dy: Value, before: Sequence[int], after: Sequence[int]) -> Value | None:
    """Returns the sum of the gradient over the padding; None if there is none."""
    total: Value | None = None
    for axis, (b, a) in enumerate(zip(before, after, strict=True)):
        size = dy.shape[axis]
        low, high = max(b, 0), size - max(a, 0)
        for start, stop in ((0, low), (high, size)):
            if start < stop:
                part = dy.slice(start, stop, axis).sum()
                total = part if total is None else total + part
        dy = dy.slice(low, high, axis)
    return total


def _folded(
    dy: Value, shape: Sequence[int], before: Sequence[int], after: Sequence[int], mode: str
) -> Value:
    """Returns the gradient of a Pad that copies elements (`mode` reflect, edge or wrap): for each
    element, the sum over its copies. Each dimension is multiplied by a matrix of zeros and ones."""
    for axis, (b, a) in enumerate(zip(before, after, strict=True)):
        if not b and not a:
            continue
        kept = np.arange(shape[axis])[max(-b, 0) : shape[axis] - max(-a, 0)]
        source = np.pad(kept, (max(b, 0), max(a, 0)), mode=mode)  # type: ignore[call-overload]
        dy = along(dy, axis, np.eye(shape[axis])[source])
    return dy


def along(x: Value, axis: int, matrix: Array) -> Value:
    """Returns the tensor with dimension `axis` multiplied by a matrix, which has a row for each
    element of that dimension."""
    return x.swap(axis, -1).op("MatMul", matrix.astype(x.dtype)).swap(axis, -1)


@vjp("Tile")
def tile(v: Vjp) -> Grads:
    """The gradient rule of Tile: sums over the repeats, whose number follows from the shapes."""
    shape: list[int] = []
    for size, out in zip(v.x.shape, v.y.shape, strict=True):
        shape += [out // size if size else 0, size]
    return [v.dy.reshape(shape).sum(range(0, len(shape), 2))]


@vjp("DepthToSpace")
def depth_to_space(v: Vjp) -> Grads:
    block = v.attr("blocksize")
    n, c, h, w = v.x.shape
    if v.attr("mode") == "DCR":
        return [v.dy.op("SpaceToDepth", blocksize=block)]
    parts = v.dy.reshape([n, c // block**2, h, block, w, block])
    return [parts.transpose([0, 1, 3, 5, 2, 4]).reshape([n, c, h, w])]


@vjp("SpaceToDepth")
def space_to_depth(v: Vjp) -> Grads:
    mode = v.node.attrs.get("mode", "DCR")  # since opset 28
    return [v.dy.op("DepthToSpace", blocksize=v.attr("blocksize"), mode=mode)]
