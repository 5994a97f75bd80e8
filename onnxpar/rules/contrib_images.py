"""onnxruntime's own convolutions and pools: with channels last, quantized, or with channels in
blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.graph.tensors import Size, dtype_of, given, tensor_shape
from onnxpar.rules.communicate import communicating, number, total
from onnxpar.rules.notation import dims_text
from onnxpar.rules.quantization import finish_requantized
from onnxpar.rules.rule import Lowering, Rule, einsum, given_specs, names, rule, whole_rule
from onnxpar.rules.windows import KERNEL, lower_windows, one_window, windows

DOMAIN = "com.microsoft"
_BLOCKS = "its memory is in blocks of channels whose width the CPU decides, unlike its shape"
_PADS = "data-dependent padding"


def _image(space: Sequence[str], channels: str, last: bool) -> str:
    """Returns the dimensions of an image as text of a rule: `n c h w`, or `n h w c` if `last`
    (channels come last)."""
    return dims_text(["n", *space, channels] if last else ["n", channels, *space])


@rule("NhwcMaxPool QLinearAveragePool", domain=DOMAIN)
def pool(node: gs.Node) -> Rule:
    """Sharding rule of NhwcMaxPool, QLinearAveragePool: `n c h w -> n c y x` or
    `n h w c -> n y x c`, as ONNX's pools: each rank fetches the rows that its windows read."""
    last = node.op == "NhwcMaxPool" or bool(node.attrs.get("channels_last"))
    first = 1 if last else 2
    space = windows(node, node.attrs["kernel_shape"], first)
    before, after = (_image(dims, "c", last) for dims in (space.before, space.after))
    dtype = dtype_of(node.inputs[0])
    blank = np.array(np.iinfo(dtype).min, dtype) if node.op == "NhwcMaxPool" else None
    return einsum(
        node,
        f"{before}{', _' * (len(node.inputs) - 1)} -> {after}",
        whole=space.whole,
        lower=lower_windows(space, first=first, blank=blank),
        **space.fields(),
    )


@rule("MaxpoolWithMask", domain=DOMAIN)
def masked_pool(node: gs.Node) -> Rule:
    """Sharding rule of MaxpoolWithMask: `n c h, 1 1 h -> n c y`: a rank fetches the elements of
    image and mask that its windows read. Two or more spatial dimensions must stay whole."""
    if any(s != 1 for s in (tensor_shape(node.inputs[1]) or ())[:2]):
        return whole_rule(node, "the kernel counts through a mask with several channels")
    space = windows(node, node.attrs["kernel_shape"])
    before, after = (_image(dims, "c", False) for dims in (space.before, space.after))
    if len(space.before) > 1:
        space.give_up("the kernel never masks the first element of an image")

    def lower(build: Lowering) -> None:
        operands = [space.fetch(build, build.input(i)) for i in range(2)]
        build.finish(node.op, operands, domain=DOMAIN, **space.attributes(node))

    mask = dims_text(["1", "1", *space.before])
    return einsum(
        node, f"{before}, {mask} -> {after}", whole=space.whole, lower=lower, **space.fields()
    )


@rule("QLinearGlobalAveragePool", domain=DOMAIN)
def global_pool(node: gs.Node) -> Rule:
    """Sharding rule of QLinearGlobalAveragePool: `n c h w -> n c 1 1` or `n h w c -> n 1 1 c`; if h
    or w is split, ranks add sums of integers, and scale the total."""
    shape = tensor_shape(node.inputs[0]) or ()
    last = bool(node.attrs.get("channels_last"))
    space = names("h", len(shape) - 2)
    axes = [i + (1 if last else 2) for i in range(len(space))]
    sizes = [shape[i] for i in axes]
    before, after = _image(space, "c", last), _image(["1"] * len(space), "c", last)

    def lower(build: Lowering) -> None:
        x, point = (build.add("Cast", [build.input(i)], to=TensorProto.INT32) for i in (0, 2))
        summed = total(build, build.add("Sub", [x, point]), axes, space)
        count = number(build, math.prod(s or 0 for s in sizes), np.float32)
        below = build.add("Mul", [build.input(3), count])
        finish_requantized(build, summed, build.add("Div", [build.input(1), below]), 4)

    fields = communicating(node, space, sizes, lower)
    return einsum(node, f"{before}, _, _, _, _ -> {after}", **fields)


@rule("Conv MaxPool AveragePool GlobalAveragePool GlobalMaxPool", domain="com.microsoft.nchwc")
@rule("ReorderInput ReorderOutput Upsample", domain="com.microsoft.nchwc")
def blocked(node: gs.Node) -> Rule:
    """Sharding rule of onnxruntime's ops on channels in blocks: `n c h w, _ -> n o y x`: only the
    batch n may be split."""
    rank = len(tensor_shape(node.inputs[0]) or ())
    before, after = dims_text(["n", *names("h", rank - 1)]), dims_text(["n", *names("y", rank - 1)])
    rest = ["_"] * (len(node.inputs) - 1)
    if node.op == "Conv" and given(node, 3) is not None:
        rest[2] = after
    whole = dict.fromkeys([*names("h", rank - 1), *names("y", rank - 1)], _BLOCKS)
    return einsum(node, f"{', '.join([before, *rest])} -> {after}", whole=whole)


@rule("GridSample", domain=DOMAIN)
def grid_sample(node: gs.Node) -> Rule:
    """Sharding rule of GridSample: `n c h w, n y x z -> n c y x`; h, w and z must stay whole."""
    whole = dict.fromkeys("hwz", "sampling positions may lie anywhere in it")
    return einsum(node, "n c h w, n y x z -> n c y x", whole=whole)


@rule("CropAndResize", domain=DOMAIN)
def crop_and_resize(node: gs.Node) -> Rule:
    """Sharding rule of CropAndResize: `n c h w, r z, r, _ -> r c y x`: only regions r and channels
    c may be split."""
    whole = dict.fromkeys("nhwzyx", "regions may lie anywhere in it")
    return einsum(node, "n c h w, r z, r, _ -> r c y x", whole=whole)


@rule("ConvTransposeWithDynamicPads", domain=DOMAIN)
def transposed_convolution(node: gs.Node) -> Rule:
    """Sharding rule of ConvTransposeWithDynamicPads:
    `n (g c) h w, (g c) o _ _, _, (g o) -> n (g o) y x`, with g groups; if c is split, the result is
    a partial sum, and only one rank adds the bias. h and w must stay whole, because pads are data
    (the loader turns a node with constant pads into a ConvTranspose)."""
    image, weight = (tensor_shape(node.inputs[i]) or () for i in range(2))
    group = int(node.attrs.get("group", 1))
    if image[1] is None:
        return whole_rule(node, "a data-dependent number of channels")
    c, o = ("(g c)", "(g o)") if group > 1 else ("c", "o")
    window = names("w", len(image) - 2)
    bias = frozenset({3}) if given(node, 3) is not None else frozenset[int]()
    operands = [_image(names("h", len(window)), c, False), dims_text([c, "o", *window]), "_", o]
    sizes: dict[str, Size] = {"g": group, "c": image[1] // group, "o": weight[1]}
    space = [*names("h", len(window)), *names("y", len(window))]
    return einsum(
        node,
        f"{', '.join(given_specs(operands, node.inputs))} -> "
        f"{_image(names('y', len(window)), o, False)}",
        sizes=sizes,
        reduce={"c": "sum"},
        whole=dict.fromkeys(space, _PADS) | dict.fromkeys(window, KERNEL),
        additive=bias,
        local={"group": lambda local: local.size("g")} if group > 1 else {},
    )


@rule("UnfoldTensor", domain=DOMAIN)
def unfold(node: gs.Node) -> Rule:
    """Sharding rule of UnfoldTensor: `a h c -> a y c z`, y windows of z elements along h. h and y
    are split over the same axes, and a rank fetches the elements that its windows read."""
    shape = tensor_shape(node.inputs[0]) or ()
    dims = names("d", len(shape))
    at = node.attrs.get("dim", -1) % len(dims)
    count = (tensor_shape(node.outputs[0]) or ())[at]
    space = one_window(shape[at], count, node.attrs["size"], node.attrs.get("step", 1))

    def lower(build: Lowering) -> None:
        x, _ = space.read(build, build.input(0), None, at)
        build.finish(node.op, [x], domain=DOMAIN, **node.attrs)

    before, after = (
        [*dims[:at], *window_dims, *dims[at + 1 :]] for window_dims in (space.before, space.after)
    )
    return einsum(
        node,
        f"{dims_text(before)} -> {dims_text([*after, 'z'])}",
        whole={**space.whole, "z": "the elements of one window"},
        lower=lower,
        **space.fields(),
    )
