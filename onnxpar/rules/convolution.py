"""Convolutions: windows over space, and sums over channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import dtype_of, given, tensor_shape
from onnxpar.rules.contraction import dequantized
from onnxpar.rules.notation import dims_text
from onnxpar.rules.quantization import is_one_point, lower_quantized_convolution
from onnxpar.rules.rule import FIRST, Lowering, Rule, einsum, rule, whole_rule
from onnxpar.rules.windows import KERNEL, lower_windows, windows

ROUNDED = "the sum is rounded to the quantized type"
UNKNOWN = "a data-dependent number of channels"


@dataclass(frozen=True)
class Parts:
    """The parts of a convolution's rule.

    image, weight, result  the dimensions of these tensors, as text of a rule
    channels      the output channels, "o" or "(g o)"
    fields        further fields of the rule
    covered       the spatial dimensions that a single window covers whole
    """

    image: str
    weight: str
    channels: str
    result: str
    fields: dict[str, Any]
    covered: list[int]


def convolution_parts(node: gs.Node, weight: int) -> Parts | None:
    """Returns the parts of the rule `n (g c) h w, (g o) c _ _ -> n (g o) y x`, or with channels
    last, `n h w (g c)`; None if the number of channels is data-dependent. There are g groups.
    `weight` is the index of the weight operand.

    If h or w is split, the rank runs the same op on the elements of the image that its windows
    read.
    """
    image, kernel = (tensor_shape(node.inputs[i]) or () for i in (0, weight))
    out = tensor_shape(node.outputs[0]) or ()
    group = node.attrs.get("group", 1)
    first, at = _places(node)
    channels, results = image[at], out[at]
    if channels is None or results is None:
        return None
    space = windows(node, kernel[2:], first)
    c, o = ("(g c)", "(g o)") if group > 1 else ("c", "o")
    window = [f"{'h' if i in space.covered else 'w'}{i}" for i in range(len(kernel) - 2)]
    groups: dict[str, Any] = {"group": lambda local: local.size("g")} if group > 1 else {}
    local = dict(groups)
    if space.covered:
        local["kernel_shape"] = lambda _: None  # inferred from the rank's shard of the weight
    before, after = [c, *space.before], [o, *space.after]
    if at != 1:
        before, after = [*space.before, c], [*space.after, o]
    return Parts(
        dims_text(["n", *before]),
        dims_text([*([c, "o"] if node.op == "ConvTranspose" else [o, "c"]), *window]),
        o,
        dims_text(["n", *after]),
        {
            "sizes": {"g": group, "c": channels // group, "o": results // group},
            "whole": {**{w: KERNEL for w in window if w[0] == "w"}, **space.whole},
            "local": local,
            "lower": lower_windows(space, first=first, blank=_blank(node), **groups),
            **space.fields(),
        },
        space.covered,
    )


def _places(node: gs.Node) -> tuple[int, int]:
    """Returns (first spatial dimension of an image, dimension of its channels)."""
    return (1, -1) if node.attrs.get("channels_last") else (2, 1)


def _blank(node: gs.Node) -> Any:
    """Returns the value that changes no result if it stands in an image in place of padding: 0, or
    for a quantized image the index of the operand with its zero point; None if there is no such
    value."""
    point = {"QLinearConv": 2, "ConvInteger": 2}.get(node.op)
    dtype = dtype_of(node.inputs[0])
    if point is None or (node.op == "ConvInteger" and given(node, point) is None):
        return np.zeros((), dtype)
    return point if tensor_shape(node.inputs[point]) == () else None


@rule("Conv ConvTranspose")
def convolution(node: gs.Node) -> Rule:
    """Sharding rule of Conv, ConvTranspose: `n (g c) h w, (g o) c _ _, (g o) -> n (g o) y x`; if c
    is split, the result is a partial sum, and only one rank adds the bias."""
    parts = convolution_parts(node, 1)
    if parts is None:
        return whole_rule(node, UNKNOWN)
    # onnxruntime fuses Conv and DequantizeLinear to QLinearConv, which reads the first scale
    fields = parts.fields | ({"nonempty": frozenset("o")} if dequantized(node.inputs[1]) else {})
    if given(node, 2) is None:
        rest = ", _" * (len(node.inputs) - 2)
        text = f"{parts.image}, {parts.weight}{rest} -> {parts.result}"
        return einsum(node, text, linear=(FIRST, frozenset({1})), **fields)
    return einsum(
        node,
        f"{parts.image}, {parts.weight}, {parts.channels} -> {parts.result}",
        linear=(frozenset({0, 2}), frozenset({1, 2})),
        additive=frozenset({2}),
        **fields,
    )


@rule("ConvInteger")
def convolution_integer(node: gs.Node) -> Rule:
    """Sharding rule of ConvInteger: the rule of Conv; every rank subtracts the zero points before
    its product."""
    parts = convolution_parts(node, 1)
    if parts is None:
        return whole_rule(node, UNKNOWN)
    points = [_per_channel(t, parts.channels) for t in node.inputs[2:]]
    text = f"{', '.join([parts.image, parts.weight, *points])} -> {parts.result}"
    return einsum(node, text, **parts.fields)


@rule("QLinearConv")
@rule("QLinearConv", domain="com.microsoft")
def qlinear_convolution(node: gs.Node) -> Rule:
    """Sharding rule of QLinearConv: the rule of Conv; if c is split, ranks add 32-bit sums, and
    scale the total."""
    parts = convolution_parts(node, 3)
    if parts is None:
        return whole_rule(node, UNKNOWN)
    scales = [_per_channel(t, parts.channels) for t in node.inputs[4:6]]
    bias = [_per_channel(t, parts.channels) for t in node.inputs[8:]]
    operands = [parts.image, "_", "_", parts.weight, *scales, "_", "_", *bias]
    summed = [f"h{i}" for i in parts.covered]
    fields = {**parts.fields, "whole": {**dict.fromkeys(summed, ROUNDED), **parts.fields["whole"]}}
    if is_one_point(node.inputs[5]):
        fields |= {key: fields[key] | {"c"} for key in ("communicating", "lowered")}
        fields["lower"] = _lower_quantized(node, fields["lower"])
    else:
        fields["whole"]["c"] = ROUNDED
    return einsum(node, f"{', '.join(operands)} -> {parts.result}", **fields)


def _lower_quantized(
    node: gs.Node, by_windows: Callable[[Lowering], None]
) -> Callable[[Lowering], None]:
    """Returns a lowering of QLinearConv: if input channels are split, ranks add sums of integers
    before the result is rounded; otherwise `by_windows`, the lowering for split rows."""
    first, at = _places(node)
    space = windows(node, (tensor_shape(node.inputs[3]) or ())[2:], first)

    def lower(build: Lowering) -> None:
        if not build.local.is_split("c"):
            by_windows(build)
            return
        x, padded = space.read(build, build.input(0), _blank(node), first)
        attrs = space.attributes(node, padded)
        attrs.pop("channels_last", None)
        if node.attrs.get("group", 1) > 1:
            attrs["group"] = lambda local: local.size("g")
        lower_quantized_convolution("c", x, at == -1, **attrs)(build)

    return lower


def _per_channel(tensor: gs.Tensor, channels: str) -> str:
    """Returns the dimensions of a scale, zero point or bias as text of a rule: `channels`, or "1"
    where it has one element; `_` if absent."""
    if not tensor.name:
        return "_"
    return dims_text("1" if s == 1 else channels for s in tensor_shape(tensor) or ())
