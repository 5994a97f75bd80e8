"""onnxruntime's own elementwise ops, also quantized ones, and ops that compute rows separately."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, constant, dtype_of, tensor_shape
from onnxpar.rules.communicate import communicating
from onnxpar.rules.elementwise import broadcast
from onnxpar.rules.index_tuples import gather_nd
from onnxpar.rules.notation import Cat, Expr, Spec, Var, dims_text
from onnxpar.rules.rule import FIRST, Lowering, Rule, einsum, names, rule, whole_rule

DOMAIN = "com.microsoft"
_ROW = "the op computes over whole rows"
_ROUNDED = "it rounds shares of a sum of floats, which another order of the sum may tip over"


@rule("Gelu FastGelu QuickGelu BiasGelu ScaledSiLU GatedAdd LinearAttentionGate", domain=DOMAIN)
@rule("QLinearAdd QLinearMul QLinearSigmoid QLinearLeakyRelu QLinearWhere", domain=DOMAIN)
@rule("MurmurHash3 SampleOp", domain=DOMAIN)
def elementwise(node: gs.Node) -> Rule:
    """Sharding rule of onnxruntime's elementwise ops: `d0 d1, d1 -> d0 d1`; operands such as
    biases, scales and zero points are broadcast."""
    return broadcast(node)


@rule("QLinearConcat", domain=DOMAIN)
def quantized_concat(node: gs.Node) -> Rule:
    """Sharding rule of QLinearConcat: `_, _, a d, _, _, b d, _, _ -> (a + b) d`: each concatenated
    tensor is followed by its scale and zero point."""
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
    return Rule.of(tuple(inputs), ((*dims[:axis], joined, *dims[axis + 1 :]),), sizes)


@rule("QLinearSoftmax", domain=DOMAIN)
def quantized_softmax(node: gs.Node) -> Rule:
    """Sharding rule of QLinearSoftmax: `d0 d1, _ -> d0 d1`; the op's axis (before opset 13: all
    dimensions from the axis on) must stay whole, because the kernel rounds shares of a sum of
    floats to integers: another order of the sum may round a tie differently. Gathering the bytes of
    the operand is cheap."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    axis = node.attrs.get("axis", -1) % len(dims)
    normalised = dims[axis : axis + 1] if node.attrs["opset"] >= 13 else dims[axis:]
    return _over(node, dims, normalised, _ROUNDED)


def _over(node: gs.Node, dims: list[str], whole: list[str], why: str = _ROW) -> Rule:
    """Returns the rule of an op whose result has the dimensions `dims` of operand 0; of these,
    `whole` must not be split, for the reason `why`."""
    rest = ", _" * (len(node.inputs) - 1)
    text = dims_text(dims)
    return einsum(node, f"{text}{rest} -> {text}", whole=dict.fromkeys(whole, why))


@rule("Inverse", domain=DOMAIN)
def matrices(node: gs.Node) -> Rule:
    """Sharding rule of Inverse: `b m n, _ -> b m n`; m and n, the matrix, must stay whole."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    return _over(node, dims, dims[-2:])


rule("GatherND", domain=DOMAIN)(gather_nd)


@rule("CDist", domain=DOMAIN)
def distances(node: gs.Node) -> Rule:
    """Sharding rule of CDist, distances between rows: `m k, n k -> m n`: sums of squares over k; if
    k is split, ranks add their sums before the square root."""

    def lower(build: Lowering) -> None:
        result, shape = node.outputs[0], build.local.output_shape(0)
        type_ = (dtype_of(result), shape)
        operands = [build.filled(build.input(i), "k", 1) for i in range(2)]
        part = build.make("CDist", operands, type_, domain=DOMAIN, metric="sqeuclidean")
        build.finish("Sqrt", [build.all_reduce(part, ["k"])])

    metric = node.attrs.get("metric", "sqeuclidean")
    is_root = metric in ("euclidean", b"euclidean")
    fields = communicating(node, ["k"], (), lower) if is_root else {}
    return einsum(node, "m k, n k -> m n", **fields)


@rule("NGramRepeatBlock", domain=DOMAIN)
def repeated_ngrams(node: gs.Node) -> Rule:
    """Sharding rule of NGramRepeatBlock: `b s, b v -> b v`: only the batch b may be split."""
    return einsum(node, "b s, b v -> b v", whole=dict.fromkeys("sv", _ROW))


@rule("ExpandDims", domain=DOMAIN)
def expand_dims(node: gs.Node) -> Rule:
    """Sharding rule of ExpandDims: `a b, _ -> a 1 b`; a constant says where the new dimension
    stands."""
    axis = constant(node.inputs[1])
    if axis is None:
        return whole_rule(node, "a data-dependent axis")
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    at = int(axis.reshape(-1)[0]) % (len(dims) + 1)
    out = dims_text([*dims[:at], "1", *dims[at:]])
    return einsum(node, f"{dims_text(dims)}, _ -> {out}", linear=(FIRST,), monotone=FIRST)
