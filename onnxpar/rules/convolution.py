"""Convolutions and pools: windows over space, which stays whole, and sums over channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    wide, narrow = (out, size) if node.op == "ConvTranspose" else (size, out)
    fits = (width - 1) * dilation + 1 <= stride and wide == narrow * stride
    return fits and not (pads[i] or pads[rank + i] or grown)


@rule("Conv ConvTranspose")
def convolution(node: gs.Node) -> Rule:
    """`n (g c) h w, (g o) c _ _, (g o) -> n (g o) y x`; c is reduced and the bias added once."""
    image, kernel, out = (tensor_shape(t) or () for t in (*node.inputs[:2], node.outputs[0]))
    group = node.attrs.get("group", 1)
    if image[1] is None or out[1] is None:
        return whole_rule(node, "channels that only a run can tell")
    space = windows(node, kernel[2:])
    c, o = ("(g c)", "(g o)") if group > 1 else ("c", "o")
    weight = [c, "o"] if node.op == "ConvTranspose" else [o, "c"]
    bias = given(node, 2) is not None
    window = names("w", len(kernel) - 2)
    operands = [dims_text(["n", c, *space.before]), dims_text([*weight, *window])]
    operands += [o if bias else "_"] * (len(node.inputs) - 2)
    return einsum(
        node,
        f"{', '.join(operands)} -> {dims_text(['n', o, *space.after])}",
        sizes={"g": group, "c": image[1] // group, "o": out[1] // group, **space.sizes},
        whole={**dict.fromkeys(window, WINDOW), **space.whole},
        linear=(frozenset({0, 2}), frozenset({1, 2})) if bias else (FIRST, frozenset({1})),
        additive=frozenset({2}) if bias else frozenset(),
        local={"group": lambda local: local.size("g")} if group > 1 else {},
    )


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
