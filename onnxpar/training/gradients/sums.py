"""Computes a sum over the iterations of a loop by one op after the loop, from stacked values.

The gradient of a weight is a sum of products, one per iteration. A single product is faster;
and if the batch is sharded, the ranks communicate only once, after the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import constant
from onnxpar.training.gradients.value import Value

Stacks = Mapping[str, Value]
"""The stacks of rows (the values of a tensor in all iterations), by name of the row."""


@dataclass(frozen=True)
class Sum:
    """A sum over the iterations of a loop. Each iteration returns `rows`; `total` is a function
    from their stacks to the sum."""

    rows: list[Value]
    total: Callable[[Stacks], Value]


def sum_after(part: Value, inner: Container[str]) -> Sum | None:
    """Returns the sum of `part` over all iterations of a loop, computed after the loop from stacks
    of other tensors of the loop's body. `inner` has the names of the body's tensors. None if `part`
    does not consist of products and sums."""
    node = part.tensor.inputs[0] if part.tensor.inputs else None
    rule = None if node is None else _SUMMED_AFTER.get(node.op)
    total = rule(part, node, inner) if rule is not None else None
    return total if total and all(row.tensor.name in inner for row in total.rows) else None


def _add(part: Value, node: gs.Node, inner: Container[str]) -> Sum | None:
    """Returns the sum over the iterations of `part`, the result of an Add: the sum of its operands'
    sums."""
    terms = [part.builder.value(t) for t in node.inputs]
    sums = [sum_after(t, inner) for t in terms if t.shape == part.shape]
    if len(sums) < 2 or sums[0] is None or sums[1] is None:
        return None
    a, b = sums[0], sums[1]
    return Sum([*a.rows, *b.rows], lambda stacks: a.total(stacks) + b.total(stacks))


def _moved(part: Value, node: gs.Node, inner: Container[str]) -> Sum | None:
    """Returns the sum over the iterations of `part`, the result of a Reshape or Transpose: the sum
    of its operand, reshaped or transposed."""
    within = sum_after(part.builder.value(node.inputs[0]), inner)
    if within is None:
        return None
    if node.op == "Reshape":
        return Sum(within.rows, lambda stacks: within.total(stacks).reshape(part.shape))
    perm = node.attrs.get("perm") or list(reversed(range(part.rank)))
    return Sum(within.rows, lambda stacks: within.total(stacks).transpose(perm))


def _reduced(part: Value, node: gs.Node, inner: Container[str]) -> Sum | None:
    """Returns the sum over the iterations of `part`, the result of a ReduceSum: one sum of the
    stacked operand."""
    x, axes = part.builder.value(node.inputs[0]), constant(node.inputs[1])
    if axes is None:
        return None
    over = [0, *(int(a) % x.rank + 1 for a in axes)]
    return Sum([x], lambda stacks: stacks[x.tensor.name].sum(over).reshape(part.shape))


def _product(part: Value, node: gs.Node, inner: Container[str]) -> Sum | None:
    """Returns the sum over the iterations of `part`, the result of a matrix product: a single
    product of the stacked operands, which also sums over the iterations."""
    if part.rank != 2 or len(node.inputs) != 2 or node.attrs.get("alpha", 1.0) != 1.0:
        return None
    a, a_transposed = _source(part, node, 0)
    b, b_transposed = _source(part, node, 1)

    def rows(stacks: Stacks, x: Value, is_transposed: bool) -> Value:
        """Returns the stack of a matrix as one matrix; its rows are the summed dimension, of all
        iterations."""
        stack = stacks[x.tensor.name]
        stack = stack.transpose([0, 2, 1]) if is_transposed else stack
        return stack.reshape([stack.shape[0] * stack.shape[1], stack.shape[2]])

    def total(stacks: Stacks) -> Value:
        return rows(stacks, a, not a_transposed).swap() @ rows(stacks, b, b_transposed)

    return Sum([a, b], total)


def _source(part: Value, node: gs.Node, index: int) -> tuple[Value, bool]:
    """Returns (an operand of a matrix product before any transposition, True if the product
    transposes it)."""
    tensor = node.inputs[index]
    is_transposed = bool(node.attrs.get("transA" if index == 0 else "transB", 0))
    maker = tensor.inputs[0] if tensor.inputs else None
    if maker is not None and maker.op == "Transpose":
        return part.builder.value(maker.inputs[0]), not is_transposed
    return part.builder.value(tensor), is_transposed


_SUMMED_AFTER: dict[str, Callable[[Value, gs.Node, Container[str]], Sum | None]] = {
    "Add": _add,
    "Reshape": _moved,
    "Transpose": _moved,
    "ReduceSum": _reduced,
    "MatMul": _product,
    "Gemm": _product,
}
