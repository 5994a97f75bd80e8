"""Finds integers that are known before a run, in vectors that also hold unknown sizes.

Exporters compute bounds of slices from Shape nodes. Where one dimension of a shape is
data-dependent, the loader folds none of it, though the bounds may depend on the other dimensions
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import constant, given, tensor_shape

Known = np.ndarray[Any, Any]
"""An array of integers, in which None stands for an unknown one."""

_DEEPEST = 24
"""Longest chain of nodes that is followed."""


def known_integers(tensor: gs.Tensor, depth: int = 0) -> Known | None:
    """Returns the elements of an integer tensor, with None for each element that is not known; None
    if the tensor is not integer arithmetic on shapes and constants. `depth` counts the nodes
    followed so far."""
    value = constant(tensor)
    if value is not None:
        return value.astype(object) if value.dtype.kind in "iub" else None
    if not tensor.inputs or depth > _DEEPEST:
        return None
    node = tensor.inputs[0]
    follow = _FOLLOWED.get(node.op)
    if follow is None:
        return None
    if node.op == "Shape":
        shape = tensor_shape(node.inputs[0])
        if shape is None:
            return None
        sizes = np.array(shape, object)
        return sizes[slice(node.attrs.get("start", 0), node.attrs.get("end", len(shape)))]
    operands = [known_integers(t, depth + 1) for t in node.inputs if t.name]
    if any(x is None for x in operands):
        return None
    result: Known | None = follow(node, *operands)
    return result


def integers(tensor: gs.Tensor | None) -> list[int] | None:
    """Returns the elements of an integer tensor as a flat list; None if any of them is not
    known."""
    known = known_integers(tensor) if tensor is not None else None
    if known is None or any(x is None for x in known.reshape(-1)):
        return None
    return [int(x) for x in known.reshape(-1)]


def given_integers(node: gs.Node, index: int) -> list[int] | None:
    """Returns the elements of operand `index` of a node as a flat list; None if it is left out or
    not known."""
    return integers(given(node, index))


def _arithmetic(function: Callable[[int, int], int]) -> Callable[..., Known]:
    """Returns a function that applies `function` to each pair of known elements, for a node of two
    operands."""

    def apply(node: gs.Node, a: Known, b: Known) -> Known:
        def one(x: int | None, y: int | None) -> int | None:
            return None if x is None or y is None else function(int(x), int(y))

        return np.asarray(np.frompyfunc(one, 2, 1)(a, b), object)

    return apply


def _divide(a: int, b: int) -> int:
    """Returns the quotient rounded towards 0, as onnxruntime divides integers; 0 for a division by
    0."""
    return 0 if b == 0 else int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def _gather(node: gs.Node, x: Known, at: Known) -> Known | None:
    """Returns the elements of the vector `x` at known indices; None for any other Gather."""
    if x.ndim != 1 or any(i is None for i in at.reshape(-1)):
        return None
    return np.asarray(x[at.astype(np.int64)], object)


def _slice(node: gs.Node, x: Known, *bounds: Known) -> Known | None:
    """Returns the elements of the vector `x` within known bounds; None for any other Slice."""
    values = [b.reshape(-1) for b in bounds]
    if x.ndim != 1 or not 2 <= len(values) <= 4 or any(len(v) != 1 or v[0] is None for v in values):
        return None
    start, stop = int(values[0][0]), int(values[1][0])
    return x[start : stop : int(values[3][0]) if len(values) == 4 else 1]


def _reshape(node: gs.Node, x: Known, *_: Known) -> Known:
    """Returns `x` as a scalar (Squeeze of one element) or a vector: only the order of elements
    matters here."""
    if node.op == "Squeeze" and x.size == 1:
        return x.reshape(())
    return x.reshape(-1)


_FOLLOWED: dict[str, Callable[..., Known | None]] = {
    "Shape": lambda node: None,
    "Identity": lambda node, x: x,
    "Cast": lambda node, x: x,
    "Gather": _gather,
    "Slice": _slice,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Concat": lambda node, *xs: np.concatenate([x.reshape(-1) for x in xs]),
    "Add": _arithmetic(lambda a, b: a + b),
    "Sub": _arithmetic(lambda a, b: a - b),
    "Mul": _arithmetic(lambda a, b: a * b),
    "Div": _arithmetic(_divide),
}
