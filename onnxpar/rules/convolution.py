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

    A window of one element passes its dimension through; windows that lie side by side are
    `(y w)` before and `y` after; of others both dimensions are whole.
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
        found.sizes[f"w{i}"] = width
        found.whole[f"w{i}"] = WINDOW
        apart = None not in (size, out, width) and not _is_moved(node, i, len(kernel))
        stride = (node.attrs.get("strides") or [1] * len(kernel))[i]
        if apart and width == stride == 1 and size == out:
            found.before.append(f"h{i}")
            found.after.append(f"h{i}")
        elif apart and width == stride and size == out * width and node.op != "ConvTranspose":
            found.before.append(f"(y{i} w{i})")
            found.after.append(f"y{i}")
        else:
            found.before.append(f"h{i}")
            found.after.append(f"y{i}")
            found.whole.update(dict.fromkeys((f"h{i}", f"y{i}"), WINDOW))
    return found


def _is_moved(node: gs.Node, i: int, rank: int) -> bool:
    """Whether windows start elsewhere than side by side from the first element on."""
    pads = node.attrs.get("pads") or [0] * (2 * rank)
    dilations = node.attrs.get("dilations") or [1] * rank
    grown = node.attrs.get("output_padding") or [0] * rank
    return bool(
        pads[i] or pads[rank + i] or grown[i] or dilations[i] != 1 or "output_shape" in node.attrs
    )


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
    operands = [dims_text(["n", c, *space.before])]
    operands += [dims_text([*weight, *names("w", len(kernel) - 2)])]
    operands += [o if bias else "_"] * (len(node.inputs) - 2)
    return einsum(
        node,
        f"{', '.join(operands)} -> {dims_text(['n', o, *space.after])}",
        sizes={"g": group, "c": image[1] // group, "o": out[1] // group, **space.sizes},
        whole=space.whole,
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
        whole={f: why for f, why in space.whole.items() if f in text},
        reduce={},
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
