"""Which ops have a measured speed of their own (`cost/device.py`), and how much work a node is in
the units of that speed."""

from __future__ import annotations

import math

import onnx_graphsurgeon as gs

_SLOW = frozenset(
    (
        *("Erf", "Exp", "Gelu", "Log", "LogSoftmax", "Sigmoid", "Softmax", "Softplus", "Tanh"),
        "Where",  # onnxruntime computes it in three passes
    )
)
"""Ops that take longer for each element than to read and write it."""
_NORMS = frozenset(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"))
_MASKS = frozenset(("Add", "Where"))
"""Ops that may mask the operand of a softmax."""


def rated_as(node: gs.Node) -> str | None:
    """Returns the kind of a node whose speed is measured, one of RATED; None for other nodes.

    A softmax is of the kind Softmax where a mask may come before it: the exponentials of masked
    values are denormal numbers, which processors multiply many times slower.
    """
    if node.op == "Softmax" and any(maker.op in _MASKS for maker in node.inputs[0].inputs):
        return "Softmax"
    if node.op in _SLOW:
        return "Erf"
    if node.op in _NORMS:
        return "LayerNormalization"
    return node.op if node.op in ("Transpose", "MatMul") else None


def work_of(
    kind: str, node: gs.Node, operands: list[tuple[int, ...]], result: tuple[int, ...]
) -> tuple[int, int]:
    """Returns (rows, elements) of a node of a kind of RATED, from the shapes of its operands and
    result:

    MatMul     the products of a batch, and the elements of their second operands, which onnxruntime
               packs in each run; 0 for a product by one matrix
    Transpose  the stretches that it copies, and their elements; 0 if all are single elements,
               because onnxruntime transposes these as a matrix
    Erf        no rows, and all elements
    others     stretches that are normalized together, and elements
    """
    if kind == "MatMul":
        batched = len(operands) > 1 and len(operands[1]) > 2
        return (math.prod(result[:-2]), math.prod(operands[1])) if batched else (0, 0)
    if kind == "Transpose":
        rows = copied_rows(node, result)
        return rows, math.prod(result) if rows else 0
    return 0 if kind == "Erf" else math.prod(result[:-1]), math.prod(result)


def copied_rows(node: gs.Node, shape: tuple[int, ...]) -> int:
    """Returns the number of stretches of contiguous elements that a Transpose copies; 0 if these
    are single elements, or all at once. With perm (1, 0, 2), a result (4, 6, 8) has 24 stretches of
    8."""
    perm = node.attrs.get("perm", range(len(shape))[::-1])
    last = max((i for i, source in enumerate(perm) if i != source), default=-1)
    return math.prod(shape[: last + 1]) if -1 < last < len(shape) - 1 else 0
