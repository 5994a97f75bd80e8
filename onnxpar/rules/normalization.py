"""Ops that normalise over axes, which therefore stay whole."""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from onnxpar.rules.rule import (
    Lowering,
    Rule,
    Size,
    dims_text,
    dtype_of,
    einsum,
    names,
    rule,
    tensor_shape,
    whole_rule,
)

NORMALISED = "the op normalises over it"
FLOAT = onnx.TensorProto.FLOAT


def is_short_float(tensor: gs.Tensor) -> int:
    """The element type (as ONNX numbers it) of 16-bit floats, which are reduced in float32; else
    0."""
    shorts = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
    return shorts.get(str(dtype_of(tensor)), 0)


def _dims(node: gs.Node) -> list[str]:
    return names("d", len(tensor_shape(node.inputs[0]) or ()))


@rule("Softmax LogSoftmax Hardmax")
def softmax(node: gs.Node) -> Rule:
    """`d0 d1 -> d0 d1` across its axis (before opset 13: all from its axis on)."""
    dims = _dims(node)
    since13 = node.attrs.get("onnxpar.opset", 13) >= 13
    axis = node.attrs.get("axis", -1 if since13 else 1) % max(len(dims), 1)
    normalised = dims[axis : axis + 1] if since13 else dims[axis:]
    text = dims_text(dims)
    if node.op == "Hardmax":
        return einsum(node, f"{text} -> {text}", whole=dict.fromkeys(normalised, NORMALISED))
    axes = [dims.index(d) for d in normalised]
    is_log = node.op == "LogSoftmax"
    wide = is_short_float(node.inputs[0])

    def lower(builder: Lowering) -> None:
        x = builder.add("Cast", [builder.input(0)], to=FLOAT) if wide else builder.input(0)
        largest = builder.add("ReduceMax", [x], axes=axes, keepdims=1)
        shifted = builder.add("Sub", [x, builder.all_reduce(largest, normalised, "max")])
        powers = builder.add("Exp", [shifted])
        total = builder.add("ReduceSum", [powers], axes=axes, keepdims=1)
        total = builder.all_reduce(total, normalised)
        last = (
            ("Sub", [shifted, builder.add("Log", [total])]) if is_log else ("Div", [powers, total])
        )
        if wide:
            builder.finish("Cast", [builder.add(*last)], to=wide)
        else:
            builder.finish(*last)

    return einsum(
        node,
        f"{text} -> {text}",
        across=frozenset(normalised),
        lowered=frozenset(normalised),
        lower=lower,
    )


@rule("LayerNormalization RMSNormalization")
def layer_normalization(node: gs.Node) -> Rule:
    """`b s h, h, h -> b s h ; b s 1 ; b s 1`, everything from its axis on whole."""
    dims = _dims(node)
    axis = node.attrs.get("axis", -1) % len(dims)
    operands = [dims_text(dims), *(_aligned(dims, t) for t in node.inputs[1:])]
    statistics = dims_text([*dims[:axis], *["1"] * (len(dims) - axis)])
    outputs = "; ".join([dims_text(dims), *[statistics] * (len(node.outputs) - 1)])
    whole = dict.fromkeys(dims[axis:], NORMALISED)
    return einsum(node, f"{', '.join(operands)} -> {outputs}", whole=whole)


def _aligned(dims: list[str], tensor: gs.Tensor) -> str:
    """An operand that is broadcast to the normalised tensor."""
    if not tensor.name:
        return "_"
    shape = tensor_shape(tensor) or ()
    last = dims[len(dims) - len(shape) :]
    return dims_text("1" if s == 1 else d for d, s in zip(last, shape, strict=True))


@rule("SkipLayerNormalization SkipSimplifiedLayerNormalization", domain="com.microsoft")
def skip_layer_normalization(node: gs.Node) -> Rule:
    """`b s h, b s h, h, h, h -> b s h ; _ ; _ ; b s h`, h whole."""
    if any(t.name for t in node.outputs[1:3]):
        return whole_rule(node, "its statistics are wanted")
    dims = _dims(node)
    operands = [dims_text(dims), *(_aligned(dims, t) for t in node.inputs[1:])]
    outputs = [dims_text(dims) if t.name else "_" for t in node.outputs]
    text = f"{', '.join(operands)} -> {'; '.join(outputs)}"
    return einsum(node, text, whole={dims[-1]: NORMALISED})


@rule("BatchNormalization")
def batch_normalization(node: gs.Node) -> Rule:
    """`n c h w, c, c, c, c -> n c h w`, in training with c; c and all but c whole."""
    dims = _dims(node)
    if node.attrs.get("spatial", 1) == 0 or len(dims) < 2:
        return whole_rule(node, "statistics per element")
    results = [dims_text(dims), *["d1" if t.name else "_" for t in node.outputs[1:]]]
    trains = node.attrs.get("training_mode", 0) == 1 or len(results) > 1
    batch = [d for i, d in enumerate(dims) if i != 1]
    return einsum(
        node,
        f"{dims_text(dims)}, d1, d1, d1, d1 -> {'; '.join(results)}",
        whole=dict.fromkeys(batch, NORMALISED) if trains else {},
        linear=() if trains else (frozenset({0, 2, 3}), frozenset({1, 2})),
    )


@rule("InstanceNormalization")
def instance_normalization(node: gs.Node) -> Rule:
    """`n c h w, c, c -> n c h w`, space whole."""
    dims = _dims(node)
    text = dims_text(dims)
    whole = dict.fromkeys(dims[2:], NORMALISED)
    return einsum(node, f"{text}, d1, d1 -> {text}", whole=whole)


@rule("GroupNormalization")
def group_normalization(node: gs.Node) -> Rule:
    """`n (g c) h w, (g c), (g c) -> n (g c) h w`, c and space whole (before opset 21: scale g)."""
    shape = tensor_shape(node.inputs[0]) or ()
    groups = node.attrs["num_groups"]
    if shape[1] is None:
        return whole_rule(node, "channels that only a run can tell")
    space = names("h", len(shape) - 2)
    scale = "(g c)" if tensor_shape(node.inputs[1]) == (shape[1],) else "g"
    text = dims_text(["n", "(g c)", *space])
    sizes: dict[str, Size] = {"g": groups, "c": shape[1] // groups}
    return einsum(
        node,
        f"{text}, {scale}, {scale} -> {text}",
        sizes=sizes,
        whole=dict.fromkeys(["c", *space], NORMALISED),
        local={"num_groups": lambda local: local.size("g")},
    )


@rule("LRN")
def local_response_normalization(node: gs.Node) -> Rule:
    """`n c h w -> n c h w`, c whole."""
    return _over(node, [1])


@rule("LpNormalization")
def lp_normalization(node: gs.Node) -> Rule:
    """`a b -> a b`, its axis whole."""
    return _over(node, [node.attrs.get("axis", -1)])


@rule("MeanVarianceNormalization")
def mean_variance_normalization(node: gs.Node) -> Rule:
    """`n c h w -> n c h w`, its axes whole."""
    return _over(node, node.attrs.get("axes", [0, 2, 3]))


def _over(node: gs.Node, axes: list[int]) -> Rule:
    dims = _dims(node)
    text = dims_text(dims)
    return einsum(node, f"{text} -> {text}", whole={dims[a]: NORMALISED for a in axes})
