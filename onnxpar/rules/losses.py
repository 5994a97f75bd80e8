"""Losses over classes."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.rules.rule import Rule, dims_text, einsum, given, names, rule, tensor_shape


@rule("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss")
def class_loss(node: gs.Node) -> Rule:
    """`n c s, n s, c -> n s`; a sum over n and s leaves a pending sum, a mean needs all of them."""
    space = names("s", len(tensor_shape(node.inputs[0]) or ()) - 2)
    scores, labels = dims_text(["n", "c", *space]), dims_text(["n", *space])
    has_scores = len(node.outputs) > 1 and bool(node.outputs[1].name)
    reduction = node.attrs.get("reduction", "mean")
    weights = [] if given(node, 2) is None else ["c"]
    loss = labels if reduction == "none" else "()"
    outputs = "; ".join([loss, scores] if has_scores else [loss])
    whole = {"c": "its elements are compared with each other"}
    if reduction == "mean" or (reduction == "sum" and has_scores):
        whole |= dict.fromkeys(["n", *space], "the loss is a mean, or pending beside its scores")
    return einsum(node, f"{', '.join([scores, labels, *weights])} -> {outputs}", whole=whole)
