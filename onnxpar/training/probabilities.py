"""Tells from a model's graph whether an output is probabilities, and from which scores they are
computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, constant, is_float, numel, tensor_shape
from onnxpar.training.gradients.value import Value

_MOVES = frozenset(
    (
        *("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose"),
        *("Slice", "Gather", "Expand"),
    )
)
"""Ops that only move the elements of operand 0."""
_MAKES = ("Sigmoid", "HardSigmoid", "Softmax")
_KEEPS = ("Split", "Tile", "ReduceMax", "ReduceMin", "ReduceMean", "MaxPool", "GlobalMaxPool")
"""Ops, besides moves, whose results are in [0, 1] if operand 0 is."""
_COMBINES = ("Mul", "Max", "Min", "Mean", "Concat")
"""Ops whose results are in [0, 1] if all operands are."""


def scores_behind(y: Value, op: str, axis: int | None = None) -> Value | None:
    """Returns the scores from which a Sigmoid or Softmax (`op`) computes `y`. If nodes move the
    result of that op (Reshape, Transpose), new nodes move the scores in the same way. None if no
    such op computes `y`, or if it normalizes another dimension than `axis`."""
    node, moves = made_by(y.tensor)
    if node is None or node.op != op:
        return None
    if axis is not None and _axis_after(node, moves) != axis:
        return None
    scores = y.builder.value(node.inputs[0])
    for move in moves:
        if move.op != "Cast":
            others = [y.builder.value(t) if t.name else None for t in move.inputs[1:]]
            scores = scores.op(move.op, *others, **move.attrs)
            scores.tensor.shape = move.outputs[0].shape
    return scores.cast(y.dtype)


def made_by(tensor: gs.Tensor) -> tuple[gs.Node | None, list[gs.Node]]:
    """Returns (the node that computes a tensor's elements, the nodes that then only move them, in
    order). The node is None for an input or a constant."""
    moves: list[gs.Node] = []
    while tensor.inputs and _only_moves(tensor.inputs[0]):
        moves.insert(0, tensor.inputs[0])
        tensor = tensor.inputs[0].inputs[0]
    return (tensor.inputs[0] if tensor.inputs else None), moves


def is_probability(tensor: gs.Tensor) -> bool:
    """True if the ops that compute a tensor keep it in [0, 1]."""
    node, _ = made_by(tensor)
    if node is None or node.domain not in (None, "", "ai.onnx"):
        return False
    if node.op == "Clip":
        bounds = [_value(t) for t in node.inputs[1:]]
        both = len(bounds) == 2 and None not in bounds
        are_inside = all(0 <= b <= 1 for b in bounds if b is not None)
        return are_inside and (both or is_probability(node.inputs[0]))
    if node.op == "Sub":
        return _value(node.inputs[0]) == 1 and is_probability(node.inputs[1])
    if node.op == "Where":
        return all(map(is_probability, node.inputs[1:]))
    if node.op in _COMBINES:
        return all(map(is_probability, node.inputs))
    return node.op in _MAKES or (node.op in _KEEPS and is_probability(node.inputs[0]))


def _only_moves(node: gs.Node) -> bool:
    """True if a node's result has elements of operand 0 alone, up to the rounding of floats."""
    return node.op in _MOVES and not node.domain and is_float(node.outputs[0])


def _value(tensor: gs.Tensor) -> float | None:
    """Returns the value of a constant of one element; None for any other tensor."""
    value = constant(tensor) if tensor.name and math.prod(tensor.shape or ()) == 1 else None
    return None if value is None else float(np.reshape(value, -1)[0])


def _axis_after(node: gs.Node, moves: Sequence[gs.Node]) -> int | None:
    """Returns the dimension, after the moves, that a Softmax normalizes; None if the moves divide,
    merge or cut this dimension."""
    shape = tensor_shape(node.outputs[0]) or ()
    axis: int | None = int(node.attrs.get("axis", -1)) % len(shape)
    for move in moves:
        if axis is not None:
            after = tensor_shape(move.outputs[0]) or ()
            axis, shape = _followed(move, axis, shape, after), after
    return axis


def _followed(
    move: gs.Node, axis: int, before: Sequence[Size], after: Sequence[Size]
) -> int | None:
    """Returns the dimension of a move's result that a dimension of its operand becomes; None if
    there is none."""
    if move.op == "Transpose":
        perm = list(move.attrs.get("perm") or range(len(before))[::-1])
        return perm.index(axis)
    if move.op == "Gather":
        at = int(move.attrs.get("axis", 0)) % len(before)
        return None if at == axis else axis + (len(after) - len(before) if at < axis else 0)
    if move.op in ("Slice", "Expand"):
        place = axis + len(after) - len(before)
        return place if after[place] == before[axis] else None
    ahead = numel(before[:axis])
    fits = (i for i, s in enumerate(after) if s == before[axis] and numel(after[:i]) == ahead)
    return next(fits, None)
