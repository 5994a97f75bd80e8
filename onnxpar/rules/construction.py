"""Ops that make a tensor from sizes and positions, which must be global ones."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.rules.movement import PERMUTES
from onnxpar.rules.rule import Rule, dims_text, einsum, names, rule, tensor_shape, whole_rule


@rule("Trilu")
def trilu(node: gs.Node) -> Rule:
    """`b m n, _ -> b m n`, m and n whole."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    text = dims_text(dims)
    rest = ", _" * (len(node.inputs) - 1)
    whole = dict.fromkeys(dims[-2:], "what is kept depends on the position")
    return einsum(node, f"{text}{rest} -> {text}", whole=whole, linear=PERMUTES["linear"])


@rule("OneHot")
def one_hot(node: gs.Node) -> Rule:
    """`a b, _, _ -> a b o`, o whole."""
    index = names("i", len(tensor_shape(node.inputs[0]) or ()))
    axis = node.attrs.get("axis", -1) % (len(index) + 1)
    out = dims_text([*index[:axis], "o", *index[axis:]])
    whole = {"o": "indices count from its start"}
    return einsum(node, f"{dims_text(index)}, _, _ -> {out}", whole=whole)


@rule("EyeLike Range Shape Size")
def positions(node: gs.Node) -> Rule:
    """Everything whole."""
    return whole_rule(node, "its values are global sizes or positions")
