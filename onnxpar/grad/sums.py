"""Sums over the steps of a loop that one op computes behind it, of what all steps hand out.

The gradient of a weight is such a sum of products: as one product over all steps it is quicker, and
where the ranks hold parts of a batch it stays pending until the loop is over.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.grad.value import Value
from onnxpar.ir.tensors import constant

Stacks = Mapping[str, Value]


@dataclass(frozen=True)
class Sum:
    """What each step hands out, and what it comes to: `total` takes the stacks by name of row."""

    rows: list[Value]
    total: Callable[[Stacks], Value]


def sum_behind(part: Value, inner: Container[str]) -> Sum | None:
    """The sum over steps of what each makes, where it can be had of other tensors, those that a
    step makes or is handed being `inner`; None for any other op than a product or a sum."""
    node = part.tensor.inputs[0] if part.tensor.inputs else None
    how = None if node is None else _BEHIND.get(node.op)
    found = how(part, node, inner) if how is not None else None
    return found if found and all(row.tensor.name in inner for row in found.rows) else None


def _add(part: Value, node: gs.Node, inner: Container[str]) -> Sum | None:
    terms = [part.builder.value(t) for t in node.inputs]
    sums = [sum_behind(t, inner) for t in terms if t.shape == part.shape]
    if len(sums) < 2 or sums[0] is None or sums[1] is None:
        return None
    a, b = sums[0], sums[1]
    return Sum([*a.rows, *b.rows], lambda stacks: a.total(stacks) + b.total(stacks))


def _moved(part: Value, node: gs.Node, inner: Container[str]) -> Sum | None:
    """The same elements in other places."""
    within = sum_behind(part.builder.value(node.inputs[0]), inner)
    if within is None:
        return None
    if node.op == "Reshape":
        return Sum(within.rows, lambda stacks: within.total(stacks).reshape(part.shape))
    perm = node.attrs.get("perm") or list(reversed(range(part.rank)))
    return Sum(within.rows, lambda stacks: within.total(stacks).transpose(perm))


def _reduced(part: Value, node: gs.Node, inner: Container[str]) -> Sum | None:
    x, axes = part.builder.value(node.inputs[0]), constant(node.inputs[1])
    if axes is None:
        return None
    over = [0, *(int(a) % x.rank + 1 for a in axes)]
    return Sum([x], lambda stacks: stacks[x.tensor.name].sum(over).reshape(part.shape))


def _product(part: Value, node: gs.Node, inner: Container[str]) -> Sum | None:
    """A product over the steps and what each sums over, as one."""
    if part.rank != 2 or len(node.inputs) != 2 or node.attrs.get("alpha", 1.0) != 1.0:
        return None
    a, a_turned = _source(part, node, 0)
    b, b_turned = _source(part, node, 1)

    def rows(stacks: Stacks, x: Value, turned: bool) -> Value:
        """A matrix by what is summed over, in its first dimension, and what is not."""
        stack = stacks[x.tensor.name]
        stack = stack.transpose([0, 2, 1]) if turned else stack
        return stack.reshape([stack.shape[0] * stack.shape[1], stack.shape[2]])

    def total(stacks: Stacks) -> Value:
        return rows(stacks, a, not a_turned).swap() @ rows(stacks, b, b_turned)

    return Sum([a, b], total)


def _source(part: Value, node: gs.Node, index: int) -> tuple[Value, bool]:
    """A matrix that takes part in a product, and whether it does so turned."""
    tensor = node.inputs[index]
    turned = bool(node.attrs.get("transA" if index == 0 else "transB", 0))
    maker = tensor.inputs[0] if tensor.inputs else None
    if maker is not None and maker.op == "Transpose":
        return part.builder.value(maker.inputs[0]), not turned
    return part.builder.value(tensor), turned


_BEHIND: dict[str, Callable[[Value, gs.Node, Container[str]], Sum | None]] = {
    "Add": _add,
    "Reshape": _moved,
    "Transpose": _moved,
    "ReduceSum": _reduced,
    "MatMul": _product,
    "Gemm": _product,
}
