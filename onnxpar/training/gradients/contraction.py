"""Gradients of matrix products and determinants."""

from __future__ import annotations

import math

import numpy as np

from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@vjp("MatMul", trained=(0, 1))
def matmul(v: Vjp) -> Grads:
    a, b = v.operands
    dy = v.dy
    if b.rank == 1:
        b, dy = b.unsqueeze([1]), dy.unsqueeze([-1])
    if a.rank == 1:
        a, dy = a.unsqueeze([0]), dy.unsqueeze([-2])
    if b.rank == 2 and a.rank > 2:  # one product instead of one per matrix of a batch
        count = math.prod(a.shape[:-1])
        rows, dy = a.reshape([count, a.shape[-1]]), dy.reshape([count, dy.shape[-1]])
        da, db = (dy @ b.swap()).reshape(a.shape), rows.swap() @ dy
    else:
        da, db = dy @ b.swap(), a.swap() @ dy
    return _squeezed(da, v.operands[0]), _squeezed(db, v.operands[1])


def _squeezed(gradient: Value, operand: Value) -> Value:
    """Returns the gradient in the operand's shape. They differ if the operand is a vector, which
    the product treats as a matrix."""
    if operand.rank > 1:
        return gradient
    return gradient.sum(range(gradient.rank - 2)).reshape(operand.shape)


@vjp("Gemm", trained=(0, 1, 2))
def gemm(v: Vjp) -> Grads:
    a, b = v.operands[:2]
    alpha, beta = v.attr("alpha"), v.attr("beta")
    trans_a, trans_b = v.attr("transA"), v.attr("transB")
    dy = v.dy

    def product(x: Value, y: Value, trans_x: int, trans_y: int) -> Value:
        return x.op("Gemm", y, alpha=alpha, transA=trans_x, transB=trans_y)

    da = product(b, dy, trans_b, 1) if trans_a else product(dy, b, 0, 1 - trans_b)
    db = product(dy, a, 1, trans_a) if trans_b else product(a, dy, 1 - trans_a, 0)
    return da, db, dy * beta


@vjp("Det")
def determinant(v: Vjp) -> Grads:
    """The gradient rule of Det. The derivative by an element is its cofactor: a determinant of the
    matrix without a row and a column. Cofactors exist for singular matrices, too."""
    x, size = v.x, v.x.shape[-1]
    dy = v.dy.reshape([*v.dy.shape, 1, 1])
    if size < 2:
        return [dy.expand(x.shape)]
    others = np.array([[j for j in range(size) if j != i] for i in range(size)])
    minors = x.op("Gather", others, axis=x.rank - 2).op("Gather", others, axis=x.rank)
    lead = list(range(x.rank - 2))
    row, left, column, below = range(x.rank - 2, x.rank + 2)
    minors = minors.transpose([*lead, row, column, left, below])
    signs = np.where(np.add.outer(range(size), range(size)) % 2, -1, 1)
    return [dy * minors.op("Det") * signs.astype(x.dtype)]
