"""Convolutions and pools: windows over space, which stays whole, and sums over channels."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.rules.reductions import weighted_mean
from onnxpar.rules.rule import (
    FIRST,
    Rule,
    Size,
    dims_text,
    einsum,
    given,
    is_float,
    names,
    numel,
    rule,
    tensor_shape,
    whole_rule,
)

WINDOW = "a window over it reads its neighbours"


@rule("Conv ConvTranspose")
def convolution(node: gs.Node) -> Rule:
    """`n (g c) h w, (g o) c _ _, (g o) -> n (g o) y x`; c is reduced and the bias added once.

    A window of one element passes its dimension through.
    """
    image, kernel = (tensor_shape(t) or () for t in node.inputs[:2])
    out = tensor_shape(node.outputs[0]) or ()
    group = node.attrs.get("group", 1)
    if image[1] is None or out[1] is None:
        return whole_rule(node, "channels that only a run can tell")
    window = names("w", len(image) - 2)
    before = names("h", len(image) - 2)
    after = [d if _is_point(node, i) else f"y{i}" for i, d in enumerate(before)]
    c, o = ("(g c)", "(g o)") if group > 1 else ("c", "o")
    weight = [c, "o"] if node.op == "ConvTranspose" else [o, "c"]
    bias = given(node, 2) is not None
    operands = [dims_text(["n", c, *before]), dims_text([*weight, *window])]
    operands += [o if bias else "_"] * (len(node.inputs) - 2)
    sizes: dict[str, Size] = {"g": group, "c": image[1] // group, "o": out[1] // group}
    windowed = [d for d in before + after if (d in before) != (d in after)] + window
    return einsum(
        node,
        f"{', '.join(operands)} -> {dims_text(['n', o, *after])}",
        sizes=sizes,
        whole=dict.fromkeys(windowed, WINDOW),
        linear=(frozenset({0, 2}), frozenset({1, 2})) if bias else (FIRST, frozenset({1})),
        additive=frozenset({2}) if bias else frozenset(),
        local={"group": lambda local: local.size("g")} if group > 1 else {},
    )


def _is_point(node: gs.Node, i: int) -> bool:
    """Whether each output position of a spatial dimension reads the input position of its own."""
    image, kernel, out = (tensor_shape(t) or () for t in (*node.inputs[:2], node.outputs[0]))
    rank = len(image) - 2
    strides = node.attrs.get("strides") or [1] * rank
    pads = node.attrs.get("pads") or [0] * (2 * rank)
    grown = node.attrs.get("output_padding") or [0] * rank
    return (
        kernel[2 + i] == strides[i] == 1
        and image[2 + i] == out[2 + i]
        and not (pads[i] or pads[rank + i] or grown[i] or "output_shape" in node.attrs)
    )


@rule("MaxPool AveragePool LpPool")
def pool(node: gs.Node) -> Rule:
    """`n c h w -> n c y x`, h, w, y and x whole."""
    if len(node.outputs) > 1 and node.outputs[1].name:
        return whole_rule(node, "its indices count through the whole tensor")
    space = names("h", len(tensor_shape(node.inputs[0]) or ()) - 2)
    after = names("y", len(space))
    return einsum(
        node,
        f"{dims_text(['n', 'c', *space])} -> {dims_text(['n', 'c', *after])}",
        whole=dict.fromkeys(space + after, WINDOW),
        linear=(FIRST,) if node.op == "AveragePool" and is_float(node.outputs[0]) else (),
    )


@rule("GlobalAveragePool GlobalMaxPool GlobalLpPool")
def global_pool(node: gs.Node) -> Rule:
    """`n c h w -> n c 1 1`, space reduced; a mean of parts counts by their sizes."""
    shape = tensor_shape(node.inputs[0]) or ()
    space = names("h", len(shape) - 2)
    text = f"{dims_text(['n', 'c', *space])} -> {dims_text(['n', 'c', *['1'] * len(space)])}"
    if node.op == "GlobalLpPool":
        return einsum(node, text, whole=dict.fromkeys(space, "its root follows the sum"))
    if node.op == "GlobalMaxPool":
        return einsum(node, text, reduce=dict.fromkeys(space, "max"))
    return einsum(
        node,
        text,
        linear=(FIRST,),
        lowered=frozenset(space),
        lower=weighted_mean(space, numel(shape[2:])),
    )
