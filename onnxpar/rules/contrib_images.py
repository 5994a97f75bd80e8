"""onnxruntime's own convolutions and pools: with channels last, quantized, or with channels in
blocks."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.ir.tensors import Size, given, tensor_shape
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Rule, einsum, names, rule, whole_rule

DOMAIN = "com.microsoft"
_WINDOW = "windows need neighbouring elements"
_BLOCKS = "channels are stored in blocks of the CPU's vector width"
_ROUNDED = "the sum is rounded to the quantized type"


def _image(prefix: str, rank: int, channels: str, last: bool) -> str:
    """The dimensions of an image: `n c h w`, or `n h w c` if `last` (channels come last). Names in
    space begin with `prefix`."""
    space = names(prefix, rank - 2)
    return dims_text(["n", *space, channels] if last else ["n", channels, *space])


@rule("NhwcMaxPool QLinearAveragePool MaxpoolWithMask", domain=DOMAIN)
def pool(node: gs.Node) -> Rule:
    """`n c h w -> n c y x` or `n h w c -> n y x c`; h and w must stay whole."""
    rank = len(tensor_shape(node.inputs[0]) or ())
    last = node.op == "NhwcMaxPool" or bool(node.attrs.get("channels_last"))
    before, after = _image("h", rank, "c", last), _image("y", rank, "c", last)
    rest = ["_"] * (len(node.inputs) - 1)
    if node.op == "MaxpoolWithMask":
        shape = tensor_shape(node.inputs[1]) or ()
        rest = [dims_text("1" if s == 1 else d for d, s in zip(before.split(), shape, strict=True))]
    space = [*names("h", rank - 2), *names("y", rank - 2)]
    text = f"{', '.join([before, *rest])} -> {after}"
    return einsum(node, text, whole=dict.fromkeys(space, _WINDOW))


@rule("QLinearGlobalAveragePool", domain=DOMAIN)
def global_pool(node: gs.Node) -> Rule:
    """`n c h w -> n c 1 1` or `n h w c -> n 1 1 c`; h and w must stay whole."""
    rank = len(tensor_shape(node.inputs[0]) or ())
    last = bool(node.attrs.get("channels_last"))
    before = _image("h", rank, "c", last)
    after = dims_text("1" if d.startswith("h") else d for d in before.split())
    whole = dict.fromkeys(names("h", rank - 2), _ROUNDED)
    return einsum(node, f"{before}, _, _, _, _ -> {after}", whole=whole)


@rule("QLinearConv", domain=DOMAIN)
def quantized_convolution(node: gs.Node) -> Rule:
    """`n h w (g c), (g o) c _ _ -> n y x (g o)`, or with channels first; c, h and w must stay
    whole."""
    image, weight = (tensor_shape(node.inputs[i]) or () for i in (0, 3))
    group = node.attrs.get("group", 1)
    last = bool(node.attrs.get("channels_last"))
    rank = len(image)
    c, o = ("(g c)", "(g o)") if group > 1 else ("c", "o")
    window = names("w", rank - 2)
    per_channel = [
        "_" if not t.name else dims_text("1" if s == 1 else o for s in tensor_shape(t) or ())
        for t in node.inputs
    ]
    operands = [_image("h", rank, c, last), "_", "_", dims_text([o, "c", *window])]
    operands += [*per_channel[4:6], "_", "_", *per_channel[8:]]
    space = [*names("h", rank - 2), *names("y", rank - 2), *window]
    sizes: dict[str, Size] = {"g": group, "c": weight[1], "o": (weight[0] or 0) // group}
    return einsum(
        node,
        f"{', '.join(operands)} -> {_image('y', rank, o, last)}",
        sizes=sizes,
        whole={"c": _ROUNDED, **dict.fromkeys(space, _WINDOW)},
        local={"group": lambda at: at.size("g")} if group > 1 else {},
    )


@rule("Conv MaxPool AveragePool GlobalAveragePool GlobalMaxPool", domain="com.microsoft.nchwc")
@rule("ReorderInput ReorderOutput Upsample", domain="com.microsoft.nchwc")
def blocked(node: gs.Node) -> Rule:
    """`n c h w, _ -> n o y x`: only n may be split."""
    rank = len(tensor_shape(node.inputs[0]) or ())
    before, after = dims_text(["n", *names("h", rank - 1)]), dims_text(["n", *names("y", rank - 1)])
    rest = ["_"] * (len(node.inputs) - 1)
    if node.op == "Conv" and given(node, 3) is not None:
        rest[2] = after
    whole = dict.fromkeys([*names("h", rank - 1), *names("y", rank - 1)], _BLOCKS)
    return einsum(node, f"{', '.join([before, *rest])} -> {after}", whole=whole)


@rule("GridSample", domain=DOMAIN)
def grid_sample(node: gs.Node) -> Rule:
    """`n c h w, n y x z -> n c y x`; h, w and z must stay whole."""
    whole = dict.fromkeys("hwz", "sampling positions may lie anywhere in it")
    return einsum(node, "n c h w, n y x z -> n c y x", whole=whole)


@rule("CropAndResize", domain=DOMAIN)
def crop_and_resize(node: gs.Node) -> Rule:
    """`n c h w, r z, r, _ -> r c y x`: only regions r and channels c may be split."""
    whole = dict.fromkeys("nhwzyx", "regions may lie anywhere in it")
    return einsum(node, "n c h w, r z, r, _ -> r c y x", whole=whole)


@rule("ConvTransposeWithDynamicPads", domain=DOMAIN)
def transposed_convolution(node: gs.Node) -> Rule:
    """`n c h w, c o _ _, _, o -> n o y x`; if c is split, the result is a partial sum, and only one
    rank adds the bias. h and w must stay whole."""
    if node.attrs.get("group", 1) > 1:
        return whole_rule(node, "its channels are grouped")
    rank = len(tensor_shape(node.inputs[0]) or ())
    window = names("w", rank - 2)
    bias = frozenset({3}) if given(node, 3) is not None else frozenset[int]()
    operands = [_image("h", rank, "c", False), dims_text(["c", "o", *window]), "_"]
    operands += ["o"] if bias else ["_"] * (len(node.inputs) - 3)
    space = [*names("h", rank - 2), *names("y", rank - 2), *window]
    return einsum(
        node,
        f"{', '.join(operands[: len(node.inputs)])} -> {_image('y', rank, 'o', False)}",
        reduce={"c": "sum"},
        whole=dict.fromkeys(space, _WINDOW),
        additive=bias,
    )
