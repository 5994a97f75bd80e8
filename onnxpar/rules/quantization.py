"""Quantization: scales of a whole tensor, of an axis, or of blocks of it."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.rules.rule import Rule, dims_text, einsum, names, rule, tensor_shape, whole_rule


@rule("QuantizeLinear DequantizeLinear")
def quantize(node: gs.Node) -> Rule:
    """`a b, b, b -> a b` per axis, `a b, (), () -> a b` per tensor; an axis of blocks is whole."""
    shape, scale = (tensor_shape(t) or () for t in node.inputs[:2])
    dims = names("d", len(shape))
    axis = node.attrs.get("axis", 1)
    axis = axis % len(shape) if -len(shape) <= axis < len(shape) else 0
    text, whole = dims_text(dims), {}
    if node.attrs.get("block_size"):
        blocks = [*dims[:axis], "blocks", *dims[axis + 1 :]]
        whole = dict.fromkeys((dims[axis], "blocks"), "its blocks have a scale each")
    else:
        blocks = ["1" if s == 1 else dims[axis] for s in scale]
    rest = [dims_text(blocks) if t.name else "_" for t in node.inputs[1:]]
    return einsum(node, f"{', '.join([text, *rest])} -> {text}", whole=whole)


@rule("DynamicQuantizeLinear")
def dynamic_quantize(node: gs.Node) -> Rule:
    """Everything whole."""
    return whole_rule(node, "its scale comes from the largest of all elements")
