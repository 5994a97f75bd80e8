"""Finds the weights that are not decayed by default: biases, and scales of normalizations."""

from __future__ import annotations

from collections.abc import Collection

import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import constants
from onnxpar.graph.tensors import tensor_shape
from onnxpar.training.gradients.trained import uses_of

_VECTORS: dict[str, Collection[int]] = {
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization"), (1, 2)),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization", "RMSNormalization"), (1, 2)),
    "SimplifiedLayerNormalization": (1,),
    "SkipSimplifiedLayerNormalization": (2, 3),
    "SkipLayerNormalization": (2, 3, 4),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), (3,)),
}
"""The operands that are scales of normalizations or biases, by op."""
_MOVES = ("Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten")
_NORMALIZATIONS = (*(op for op in _VECTORS if "Norm" in op), "MeanVarianceNormalization")


def undecayed(graph: gs.Graph) -> set[str]:
    """Returns the names of the constants that weight decay leaves out, as in Hugging Face's
    Trainer: vectors and single numbers, and the scales and biases of normalizations and recurrent
    layers of any shape. An exporter may have written a normalization as other ops."""
    return {str(t.name) for t in constants(graph) if _is_undecayed(t)}


def _is_undecayed(tensor: gs.Constant) -> bool:
    """True if weight decay leaves this constant out."""
    if len(tensor.shape) < 2:
        return True
    uses = list(uses_of(tensor))
    return bool(uses) and all(_scales_or_shifts(node, i) for node, i in uses)


def _scales_or_shifts(node: gs.Node, index: int) -> bool:
    """True if operand `index` of a node is a bias of one dimension, or a scale or bias of a
    normalization."""
    if index in _VECTORS.get(node.op, ()):
        return True
    if node.op not in ("Add", "Mul"):
        return False
    operand, other = node.inputs[index], node.inputs[1 - index]
    shape = tensor_shape(operand) or ()
    if node.op == "Add" and sum(s != 1 for s in shape) < 2:
        return True
    if node.op == "Mul":
        return _is_normalized(other)
    scaled = _made_by(other)
    return (
        scaled is not None
        and scaled.op == "Mul"
        and any(
            _is_normalized(x) and tensor_shape(y) == shape
            for x, y in (scaled.inputs, scaled.inputs[::-1])
        )
    )


def _is_normalized(tensor: gs.Tensor) -> bool:
    """True if a tensor is divided by a root of its own statistics, by an op of normalization or by
    basic ops."""
    node = _made_by(tensor)
    if node is None:
        return False
    if node.op in _NORMALIZATIONS:
        return True
    if node.op == "Div":
        return _is_root(node.inputs[1])
    return node.op == "Mul" and any(map(_is_inverse_root, node.inputs))


def _is_inverse_root(tensor: gs.Tensor) -> bool:
    """True if a tensor is the inverse root of a mean."""
    node = _made_by(tensor)
    return node is not None and (
        (node.op == "Reciprocal" and _is_root(node.inputs[0]))
        or (node.op == "Div" and _is_root(node.inputs[1]))
        or (node.op == "Pow" and _is_of_mean(node.inputs[0]))
    )


def _is_root(tensor: gs.Tensor) -> bool:
    """True if a tensor is the root of a mean."""
    node = _made_by(tensor)
    return node is not None and node.op in ("Sqrt", "Pow") and _is_of_mean(node.inputs[0])


def _is_of_mean(tensor: gs.Tensor) -> bool:
    """True for a mean, possibly plus a small number or bounded from below."""
    node = _made_by(tensor)
    while node is not None and node.op in ("Add", "Max", "Clip"):
        node = next((maker for t in node.inputs if (maker := _made_by(t)) is not None), None)
    return node is not None and node.op == "ReduceMean"


def _made_by(tensor: gs.Tensor) -> gs.Node | None:
    """Returns the node that computes a tensor, before nodes that only move its elements."""
    while tensor.inputs and tensor.inputs[0].op in _MOVES:
        tensor = tensor.inputs[0].inputs[0]
    return tensor.inputs[0] if tensor.inputs else None
