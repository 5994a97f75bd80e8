"""onnxruntime's own elementwise ops, also quantized ones, and ops that compute each row by
itself."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.ir.tensors import Size, constant, given, tensor_shape
from onnxpar.rules.elementwise import broadcast
from onnxpar.rules.index_tuples import gather_nd
from onnxpar.rules.notation import Cat, Expr, Spec, Var, dims_text
from onnxpar.rules.rule import FIRST, Rule, einsum, given_specs, names, rule, whole_rule

DOMAIN = "com.microsoft"
_ROW = "the op computes over whole rows"
_COUNTED = "positions are counted from its start"


@rule("Gelu FastGelu QuickGelu BiasGelu ScaledSiLU GatedAdd LinearAttentionGate", domain=DOMAIN)
@rule("QLinearAdd QLinearMul QLinearSigmoid QLinearLeakyRelu QLinearWhere", domain=DOMAIN)
@rule("MurmurHash3 SampleOp", domain=DOMAIN)
def elementwise(node: gs.Node) -> Rule:
    """`d0 d1, d1 -> d0 d1`: operands such as biases, scales and zero points are broadcast."""
    return broadcast(node)


@rule("QLinearConcat", domain=DOMAIN)
def quantized_concat(node: gs.Node) -> Rule:
    """`_, _, a d, _, _, b d, _, _ -> (a + b) d`: a Concat of segments with a scale and a zero point
    each."""
    out = tensor_shape(node.outputs[0]) or ()
    axis = node.attrs["axis"] % len(out)
    dims: list[Expr] = [Var(f"d{i}") for i in range(len(out))]
    sizes: dict[str, Size] = {f"d{i}": s for i, s in enumerate(out) if i != axis}
    inputs: list[Spec | None] = [None] * len(node.inputs)
    segments: list[Expr] = []
    for i in range(2, len(node.inputs), 3):
        segment = Var(f"s{i // 3}")
        sizes[segment.name] = (tensor_shape(node.inputs[i]) or ())[axis]
        inputs[i] = (*dims[:axis], segment, *dims[axis + 1 :])
        segments.append(segment)
    joined = Cat(tuple(segments)) if len(segments) > 1 else segments[0]
    return Rule(tuple(inputs), ((*dims[:axis], joined, *dims[axis + 1 :]),), sizes)


@rule("QLinearSoftmax", domain=DOMAIN)
def quantized_softmax(node: gs.Node) -> Rule:
    """`d0 d1, _ -> d0 d1`; the op's axis must stay whole (before opset 13: all dimensions from
    there on)."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    axis = node.attrs.get("axis", -1) % len(dims)
    normalised = dims[axis : axis + 1] if node.attrs["opset"] >= 13 else dims[axis:]
    return _over(node, dims, normalised)


def _over(node: gs.Node, dims: list[str], whole: list[str]) -> Rule:
    """The rule of an op that may split operand 0 along all dimensions but those in `whole`."""
    rest = ", _" * (len(node.inputs) - 1)
    text = dims_text(dims)
    return einsum(node, f"{text}{rest} -> {text}", whole=dict.fromkeys(whole, _ROW))


@rule("Inverse", domain=DOMAIN)
def matrices(node: gs.Node) -> Rule:
    """`b m n, _ -> b m n`; m and n must stay whole."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    return _over(node, dims, dims[-2:])


rule("GatherND", domain=DOMAIN)(gather_nd)


@rule("BranchwiseRMSNorm GatedRMSNorm", domain=DOMAIN)
def row_normalization(node: gs.Node) -> Rule:
    """`b s h, h, b s h -> b s h`; h must stay whole, and s too for a BranchwiseRMSNorm without
    `num_branches`."""
    shape = tensor_shape(node.inputs[0]) or ()
    dims = names("d", len(shape))
    if node.op == "BranchwiseRMSNorm":
        return _over(node, dims, dims[-1:] if node.attrs.get("num_branches") else dims[-2:])
    text = dims_text(dims)
    return einsum(node, f"{text}, _, {text} -> {text}", whole={dims[-1]: _ROW})


@rule("SimplifiedLayerNormalization")
def simplified_layer_normalization(node: gs.Node) -> Rule:
    """`b s h, h -> b s h ; b s 1`; all dimensions from the op's axis on must stay whole."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    axis = node.attrs.get("axis", -1) % len(dims)
    statistics = dims_text([*dims[:axis], *["1"] * (len(dims) - axis)])
    results = "; ".join([dims_text(dims), *[statistics] * (len(node.outputs) - 1)])
    text = f"{dims_text(dims)}, {dims_text(dims[axis:])} -> {results}"
    return einsum(node, text, whole=dict.fromkeys(dims[axis:], _ROW))


@rule("EmbedLayerNormalization", domain=DOMAIN)
def embedding(node: gs.Node) -> Rule:
    """`b s, b s, v h, p h, t h, h, h, b s, b s -> b s h ; b ; b s h`: only b and s may be split."""
    operands = ["b s", "b s", "v h", "p h", "t h", "h", "h", "b s"]
    return _embedded(node, operands, mask=7, positions=8)


def _embedded(node: gs.Node, operands: list[str], mask: int, positions: int = -1) -> Rule:
    whole = dict.fromkeys("vpt", "it is looked up by index") | {"h": _ROW}
    places = given(node, positions) if positions > 0 else None
    if places is None:
        whole["s"] = _COUNTED
    else:
        operands = [*operands, "1 s" if (tensor_shape(places) or ())[0] == 1 else "b s"]
    if given(node, mask) is not None:
        whole["s"] = "the op counts the mask along it"
    operands += ["_"] * (len(node.inputs) - len(operands))
    used = given_specs(operands, node.inputs)
    made = given_specs(["b s h", "b", "b s h"], node.outputs)
    found = {c for text in used + made for c in text}
    return einsum(
        node,
        f"{', '.join(used)} -> {'; '.join(made)}",
        whole={f: why for f, why in whole.items() if f in found},
        reduce={},
    )


@rule("CDist", domain=DOMAIN)
def distances(node: gs.Node) -> Rule:
    """`m k, n k -> m n`; k must stay whole, because a square root may follow the sum."""
    return einsum(node, "m k, n k -> m n", whole={"k": "a square root may follow the sum"})


@rule("NGramRepeatBlock", domain=DOMAIN)
def repeated_ngrams(node: gs.Node) -> Rule:
    """`b s, b v -> b v`: only b may be split."""
    return einsum(node, "b s, b v -> b v", whole=dict.fromkeys("sv", _ROW))


@rule("ExpandDims", domain=DOMAIN)
def expand_dims(node: gs.Node) -> Rule:
    """`a b, _ -> a 1 b`."""
    axis = constant(node.inputs[1])
    if axis is None:
        return whole_rule(node, "a data-dependent axis")
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    at = int(axis.reshape(-1)[0]) % (len(dims) + 1)
    out = dims_text([*dims[:at], "1", *dims[at:]])
    return einsum(node, f"{dims_text(dims)}, _ -> {out}", linear=(FIRST,), monotone=FIRST)


@rule("UnfoldTensor", domain=DOMAIN)
def unfold(node: gs.Node) -> Rule:
    """`a b c -> a w c z`; the unfolded dimension b must stay whole."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    at = node.attrs.get("dim", -1) % len(dims)
    out = [*dims[:at], "w", *dims[at + 1 :], "z"]
    whole = dict.fromkeys([dims[at], "w", "z"], "its windows overlap")
    return einsum(node, f"{dims_text(dims)} -> {dims_text(out)}", whole=whole)
