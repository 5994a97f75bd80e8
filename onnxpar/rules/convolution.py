"""Convolutions and pools: windows over space, which stays whole, and sums over channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
UNKNOWN = "channels that only a run can tell"


@dataclass(frozen=True)
class Windows:
    """How spatial dimensions stand before and after an op, as rule text.

    A window of one element passes its dimension through; windows that lie side by side, in blocks
    as long as the stride, are `(y b)` before and `y` after, or `h` and `(h b)` in a ConvTranspose;
    others need both whole.
    """

    before: list[str]
    after: list[str]
    whole: dict[str, str]
    sizes: dict[str, Size]


def windows(node: gs.Node, kernel: Sequence[Size]) -> Windows:
    """The windows of a convolution or pool of that kernel."""
    found = Windows([], [], {}, {})
    for i, width in enumerate(kernel):
        size, out = ((tensor_shape(t) or ())[2 + i] for t in (node.inputs[0], node.outputs[0]))
        stride = (node.attrs.get("strides") or [1] * len(kernel))[i]
        before, after = f"h{i}", f"y{i}"
        if not _lie_apart(node, i, kernel, size, out, stride):
            found.whole.update(dict.fromkeys((before, after), WINDOW))
        elif width == stride == 1:
            after = before
        else:
            found.whole[f"b{i}"], found.sizes[f"b{i}"] = WINDOW, stride
            if node.op == "ConvTranspose":
                after = f"({before} b{i})"
            else:
                before = f"({after} b{i})"
        found.before.append(before)
        found.after.append(after)
    return found


def _lie_apart(
    node: gs.Node, i: int, kernel: Sequence[Size], size: Size, out: Size, stride: int
) -> bool:
    """Whether dimension i falls into blocks of one window each, from its first element on."""
    rank, width = len(kernel), kernel[i]
    pads = node.attrs.get("pads") or [0] * (2 * rank)
    dilation = (node.attrs.get("dilations") or [1] * rank)[i]
    grown = (node.attrs.get("output_padding") or [0] * rank)[i]
    if size is None or out is None or width is None or "output_shape" in node.attrs:
        return False
    if pads[i] or pads[rank + i] or grown:
        return False
    if node.op == "ConvTranspose":
        return width == stride and dilation == 1 and out == size * stride
    return (width - 1) * dilation + 1 <= stride and size == out * stride


@dataclass(frozen=True)
class Parts:
    """The operands of a convolution as rule text, and the fields of its rule."""

    image: str
    weight: str
    channels: str
    result: str
    fields: dict[str, Any]


def convolution_parts(node: gs.Node, weight: int) -> Parts | None:
    """`n (g c) h w, (g o) c _ _ -> n (g o) y x`; None for channels that only a run can tell."""
    image, kernel = (tensor_shape(node.inputs[i]) or () for i in (0, weight))
    out = tensor_shape(node.outputs[0]) or ()
    group = node.attrs.get("group", 1)
    if image[1] is None or out[1] is None:
        return None
    space = windows(node, kernel[2:])
    c, o = ("(g c)", "(g o)") if group > 1 else ("c", "o")
    window = names("w", len(kernel) - 2)
    return Parts(
        dims_text(["n", c, *space.before]),
        dims_text([*([c, "o"] if node.op == "ConvTranspose" else [o, "c"]), *window]),
        o,
        dims_text(["n", o, *space.after]),
        {
            "sizes": {"g": group, "c": image[1] // group, "o": out[1] // group, **space.sizes},
            "whole": {**dict.fromkeys(window, WINDOW), **space.whole},
            "local": {"group": lambda local: local.size("g")} if group > 1 else {},
        },
    )


@rule("Conv ConvTranspose")
def convolution(node: gs.Node) -> Rule:
    """`n (g c) h w, (g o) c _ _, (g o) -> n (g o) y x`; c is reduced and the bias added once."""
    parts = convolution_parts(node, 1)
    if parts is None:
        return whole_rule(node, UNKNOWN)
    if given(node, 2) is None:
        rest = ", _" * (len(node.inputs) - 2)
        text = f"{parts.image}, {parts.weight}{rest} -> {parts.result}"
        return einsum(node, text, linear=(FIRST, frozenset({1})), **parts.fields)
    return einsum(
        node,
        f"{parts.image}, {parts.weight}, {parts.channels} -> {parts.result}",
        linear=(frozenset({0, 2}), frozenset({1, 2})),
        additive=frozenset({2}),
        **parts.fields,
    )


@rule("ConvInteger")
def convolution_integer(node: gs.Node) -> Rule:
    """As Conv; zero points are subtracted before the product, on every part."""
    parts = convolution_parts(node, 1)
    if parts is None:
        return whole_rule(node, UNKNOWN)
    points = [_per_channel(t, parts.channels) for t in node.inputs[2:]]
    text = f"{', '.join([parts.image, parts.weight, *points])} -> {parts.result}"
    return einsum(node, text, **parts.fields)


@rule("QLinearConv")
def qlinear_convolution(node: gs.Node) -> Rule:
    """As Conv, but c is whole: the sum is rounded to the quantized type."""
    parts = convolution_parts(node, 3)
    if parts is None:
        return whole_rule(node, UNKNOWN)
    scales = [_per_channel(t, parts.channels) for t in node.inputs[4:6]]
    bias = [_per_channel(t, parts.channels) for t in node.inputs[8:]]
    operands = [parts.image, "_", "_", parts.weight, *scales, "_", "_", *bias]
    whole = {"c": "the sum is rounded to the quantized type", **parts.fields["whole"]}
    fields = {**parts.fields, "whole": whole}
    return einsum(node, f"{', '.join(operands)} -> {parts.result}", **fields)


def _per_channel(tensor: gs.Tensor, channels: str) -> str:
    if not tensor.name:
        return "_"
    return dims_text("1" if s == 1 else channels for s in tensor_shape(tensor) or ())


@rule("MaxPool AveragePool LpPool")
def pool(node: gs.Node) -> Rule:
    """`n c h w -> n c y x`, or `n c (y w) -> n c y` for windows side by side."""
    if len(node.outputs) > 1 and node.outputs[1].name:
        return whole_rule(node, "its indices count through the whole tensor")
    space = windows(node, node.attrs["kernel_shape"])
    text = f"{dims_text(['n', 'c', *space.before])} -> {dims_text(['n', 'c', *space.after])}"
    floating = is_float(node.outputs[0])
    return einsum(
        node,
        text,
        sizes=space.sizes,
        whole=space.whole,
        linear=(FIRST,) if node.op == "AveragePool" and floating else (),
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
