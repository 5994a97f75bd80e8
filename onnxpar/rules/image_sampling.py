"""Rules of ops that sample images at points or in regions, or assemble images from blocks."""

from __future__ import annotations

import math
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import constant, given, is_float, tensor_shape
from onnxpar.rules.movement import int64
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import FIRST, Local, Lowering, Rule, einsum, names, rule, whole_rule

_SAMPLED = "sampling positions are data-dependent"
_POINT = "the coordinates of one point"
_REGION = "each cell depends on the whole region"
_BLOCKS = "overlapping blocks are summed"
_MATRIX = "a determinant needs the whole matrix"


@rule("GridSample")
def grid_sample(node: gs.Node) -> Rule:
    """Sharding rule of GridSample: `n c h w, n y x _ -> n c y x`; h and w must stay whole, because
    points may lie anywhere in them."""
    space = names("i", len(tensor_shape(node.inputs[0]) or ()) - 2)
    points = names("o", len(space))
    return einsum(
        node,
        f"{dims_text(['n', 'c', *space])}, {dims_text(['n', *points, 'k'])}"
        f" -> {dims_text(['n', 'c', *points])}",
        whole={**dict.fromkeys(space, _SAMPLED), "k": _POINT},
        linear=(FIRST,) if is_float(node.outputs[0]) else (),
    )


@rule("AffineGrid")
def affine_grid(node: gs.Node) -> Rule:
    """Sharding rule of AffineGrid: `n _ _, _ -> n y x _`: only the batch n may be split; a rank's
    operand of sizes has its shard's n."""
    size = constant(node.inputs[1])
    if size is None:
        return whole_rule(node, "a data-dependent size")
    space = names("o", len(size) - 2)
    return einsum(
        node,
        f"n r t, _ -> {dims_text(['n', *space, 'k'])}",
        whole={
            **dict.fromkeys(("r", "t"), "a transformation needs the whole matrix"),
            **dict.fromkeys(space, "its values are global positions"),
            "k": _POINT,
        },
        linear=(FIRST,),
        local={1: lambda local: int64([local.size("n"), *size[1:]])},
    )


@rule("RoiAlign MaxRoiPool")
def regions(node: gs.Node) -> Rule:
    """Sharding rule of RoiAlign, MaxRoiPool: `n c h w, r _, r -> r c y x`: only regions r and
    channels c may be split."""
    batch = ", r" * (len(node.inputs) - 2)
    averages = node.op == "RoiAlign" and node.attrs.get("mode", "avg") == "avg"
    return einsum(
        node,
        f"n c h w, r k{batch} -> r c y x",
        whole={
            **dict.fromkeys("nhw", _SAMPLED),
            "k": _POINT,
            **dict.fromkeys("yx", _REGION),
        },
        linear=(FIRST,) if averages else (),
    )


@rule("DeformConv")
def deform_conv(node: gs.Node) -> Rule:
    """Sharding rule of DeformConv:
    `n (g c) h w, (g o) c _ _, n _ y x, (g o), n _ y x -> n (g o) y x`, with g groups: image,
    weight, offsets, bias and mask. If c is split, the result is a partial sum, and only one rank
    adds the bias. Unless all channels share offsets, g and c must stay whole."""
    image, weight = (tensor_shape(t) or () for t in node.inputs[:2])
    group = node.attrs.get("group", 1)
    if image[1] is None or weight[0] is None:
        return whole_rule(node, "a data-dependent number of channels")
    shared = node.attrs.get("offset_group", 1) == 1
    c, o = ("(g c)", "(g o)") if group > 1 else ("c", "o")
    operands = [f"n {c} h w", f"{o} c u v", "n e y x", o, "n f y x"]
    has_bias = given(node, 3) is not None
    text = ", ".join(
        operand if tensor.name else "_"
        for operand, tensor in zip(operands, node.inputs, strict=False)
    )
    reasons: dict[str, str] = (
        {} if shared else dict.fromkeys("gc", "channels have offsets of their own")
    )
    return einsum(
        node,
        f"{text} -> n {o} y x",
        sizes={"g": group, "c": image[1] // group, "o": weight[0] // group},
        whole={
            **dict.fromkeys("hw", _SAMPLED),
            **dict.fromkeys("yx", "window positions are counted from its start"),
            **dict.fromkeys("uv", "the weights of one window"),
            **dict.fromkeys("e" + "f" * (given(node, 4) is not None), "offsets of one window"),
            **reasons,
        },
        linear=(frozenset({0, 3}), frozenset({1, 3})) if has_bias else (FIRST, frozenset({1})),
        additive=frozenset({3}) if has_bias else frozenset(),
        local={"group": lambda local: local.size("g")} if group > 1 else {},
    )


@rule("MaxUnpool")
def max_unpool(node: gs.Node) -> Rule:
    """Sharding rule of MaxUnpool: `n c h w, n c h w, _ -> n c y x`. If h or w is split, each rank
    fills other elements of the same image, so the result is a partial sum. Indices are positions in
    the global result; a rank turns them into positions in its own."""
    shape = tensor_shape(node.outputs[0]) or ()
    if None in shape[1:] or (len(node.inputs) > 2 and constant(node.inputs[2]) is None):
        return whole_rule(node, "a data-dependent size")
    before, after = (names(p, len(shape) - 2) for p in ("h", "y"))
    image, channels = math.prod(s or 0 for s in shape[2:]), shape[1] or 0
    attrs = dict(node.attrs)

    def lower(build: Lowering) -> None:
        index = build.input(1)
        batch = build.add("Div", [index, int64([channels * image])])
        others = build.per_rank(lambda at: int64([(channels - at.size("c")) * image]))
        base = build.per_rank(lambda at: int64([_images_before(at) * image]))
        index = build.add("Sub", [index, build.add("Mul", [batch, others])])
        index = build.add("Sub", [index, base])
        size = build.per_rank(lambda at: int64(at.output_shape(0)))
        x = build.input(0)
        for axis, dim in enumerate(before, 2):
            x, index = (build.filled(t, dim, axis) for t in (x, index))
        build.finish("MaxUnpool", [x, index, size], **attrs)

    text = dims_text(["n", "c", *before])
    rest = ", _" * (len(node.inputs) - 2)
    return einsum(
        node,
        f"{text}, {text}{rest} -> {dims_text(['n', 'c', *after])}",
        whole=dict.fromkeys(after, "an element may be written anywhere in its image"),
        lowered=frozenset(["n", "c", *before]),
        lower=lower,
        contiguous=frozenset("nc"),
        linear=(FIRST,),
    )


def _images_before(local: Local) -> int:
    """Returns the number of images (one for each sample and channel) before the rank's first, if
    each sample had only as many channels as the rank's shard."""
    return local.interval("n")[0] * local.size("c") + local.interval("c")[0]


@rule("Col2Im")
def col2im(node: gs.Node) -> Rule:
    """Sharding rule of Col2Im: `n (c k) l, _, _ -> n c y x`: if the blocks l are split, a rank adds
    up its own, with zeros for all others: a partial sum. k and the image stay whole."""
    shape, out = tensor_shape(node.inputs[0]) or (), tensor_shape(node.outputs[0]) or ()
    rows, length = shape[1:]
    if rows is None or length is None or not out[1]:
        return whole_rule(node, "data-dependent block sizes")
    space = names("o", len(out) - 2)

    def around(local: Local) -> Any:
        start, end = local.interval("l")
        return int64([0, 0, start, 0, 0, length - end])

    def lower(build: Lowering) -> None:
        pads = build.per_rank(around)
        blocks = build.add("Pad", [build.input(0), pads])
        build.finish("Col2Im", [blocks, *(build.input(i) for i in (1, 2))], **node.attrs)

    return einsum(
        node,
        f"n (c k) l, _, _ -> {dims_text(['n', 'c', *space])}",
        sizes={"c": out[1], "k": rows // out[1]},
        whole={"k": _BLOCKS, **dict.fromkeys(space, _BLOCKS)},
        reduce={"l": "sum"},
        linear=(FIRST,),
        contiguous=frozenset("l"),
        lowered=frozenset("l"),
        lower=lower,
    )


@rule("Det")
def determinant(node: gs.Node) -> Rule:
    """Sharding rule of Det: `b m n -> b`: only the batch b may be split."""
    batch = names("b", len(tensor_shape(node.inputs[0]) or ()) - 2)
    text = f"{dims_text([*batch, 'm', 'n'])} -> {dims_text(batch)}"
    return einsum(node, text, whole=dict.fromkeys("mn", _MATRIX))
