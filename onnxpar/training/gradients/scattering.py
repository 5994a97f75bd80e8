"""Gradients of ops that write elements by index."""

from __future__ import annotations

import math

import numpy as np

from onnxpar.training.gradients.indexing import linear, scatter_each
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@vjp("ScatterElements")
def scatter_elements(v: Vjp) -> Grads:
    x, at, updates = v.operands
    return _Scattered(x, at, updates, v.y, v.dy, v.attr("axis")).gradients(v.attr("reduction"))


@vjp("ScatterND")
def scatter_nd(v: Vjp) -> Grads:
    x, indices, updates = v.operands
    how, depth = v.attr("reduction"), indices.shape[-1]
    if how in ("none", "add"):
        picked = v.dy.op("GatherND", indices)
        zeros = v.builder.zeros(updates.shape, updates.dtype)
        return v.dy if how == "add" else v.dy.op("ScatterND", indices, zeros), None, picked
    at = linear(indices, x.shape[:depth])
    rows, count = [math.prod(x.shape[:depth]), *x.shape[depth:]], [at.size, *x.shape[depth:]]
    at = at.reshape([at.size, *[1] * (x.rank - depth)]).expand(count)
    data, y, dy = (t.reshape(rows) for t in (x, v.y, v.dy))
    scattered = _Scattered(data, at, updates.reshape(count), y, dy, 0)
    of_x, _, of_updates = scattered.gradients(how)
    assert of_x is not None and of_updates is not None
    return of_x.reshape(x.shape), None, of_updates.reshape(updates.shape)


@vjp("TensorScatter")
def tensor_scatter(v: Vjp) -> Grads:
    """The gradient rule of TensorScatter: the updates get the gradient at the positions where they
    are written; the replaced elements get zero."""
    cache, update = v.operands[:2]
    axis, mode = v.attr("axis") % cache.rank, v.attr("mode")
    rows = np.arange(update.shape[axis]).reshape(
        [-1 if a == axis else 1 for a in range(cache.rank)]
    )
    at, start = v.builder.constant(rows, np.int64), v.operand(2)
    if start is not None:
        at = at + start.cast(np.int64).reshape([-1] + [1] * (cache.rank - 1))
    if mode == "circular":
        at = at.op("Mod", np.array(cache.shape[axis], np.int64))
    zeros = v.builder.zeros(update.shape, update.dtype)
    of_cache = v.dy.op("TensorScatter", zeros, start, axis=axis, mode=mode)
    return of_cache, v.dy.op("GatherElements", at.expand(update.shape), axis=axis)


class _Scattered:
    """A ScatterElements: its operands x, indices `at` and updates, its result y, and the result's
    gradient dy."""

    def __init__(self, x: Value, at: Value, updates: Value, y: Value, dy: Value, axis: int) -> None:
        self.x, self.at, self.updates, self.y, self.dy, self.axis = x, at, updates, y, dy, axis

    def gradients(self, how: str) -> Grads:
        """Returns the gradients of x, the indices (None) and the updates, for the reduction `how`
        (none, add, mul, max or min)."""
        if how == "add":
            return self.dy, None, self.pick(self.dy)
        if how == "mul":
            return self._of_product()
        if how in ("max", "min"):
            return self._of_extreme()
        zeros = self.dy.builder.zeros(self.updates.shape, self.dy.dtype)
        of_x = self.dy.op("ScatterElements", self.at, zeros, axis=self.axis)
        return of_x, None, self.pick(self.dy)

    def pick(self, value: Value) -> Value:
        """Returns the elements of a tensor of y's shape at the positions of the updates."""
        return value.op("GatherElements", self.at, axis=self.axis)

    def count(self, of_x: Value, of_updates: Value) -> Value:
        """Returns for each element of x the sum of its number in `of_x` and the numbers in
        `of_updates` of all updates that are written to the element."""
        return of_x + scatter_each(of_updates, self.at, self.axis, self.x.shape)

    def _of_product(self) -> Grads:
        """Returns the gradients with reduction "mul": the derivative by a factor is the product of
        the other factors, so it is zero if another factor is zero."""
        both = (self.x, self.updates)
        is_zero = [t.equal(0.0) for t in both]
        safe = [z.where(1.0, t) for z, t in zip(is_zero, both, strict=True)]
        marks = [z.cast(self.dy.dtype) for z in is_zero]
        zeros = self.count(*marks)
        product = safe[0].op("ScatterElements", self.at, safe[1], axis=self.axis, reduction="mul")

        def share(product: Value, zeros: Value, mark: Value, factor: Value) -> Value:
            return zeros.equal(mark).where(product / factor, 0.0)

        of_x = self.dy * share(product, zeros, marks[0], safe[0])
        picked = share(self.pick(product), self.pick(zeros), marks[1], safe[1])
        return of_x, None, self.pick(self.dy) * picked

    def _of_extreme(self) -> Grads:
        """Returns the gradients with reduction "max" or "min": equal elements share them, as in
        PyTorch."""
        holds = [
            t.equal(y).cast(self.dy.dtype)
            for t, y in ((self.x, self.y), (self.updates, self.pick(self.y)))
        ]
        share = self.dy / self.count(*holds)
        return share * holds[0], None, self.pick(share) * holds[1]
