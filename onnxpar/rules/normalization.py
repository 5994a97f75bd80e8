"""Rules of ops that normalise over axes. If such an axis is split, the ranks exchange sums."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import dtype_of, float_attr, given, tensor_shape
from onnxpar.rules.communicate import (
    communicating,
    finish,
    finish_chain,
    has_output,
    inverse_root,
    like,
    mean,
    moments,
    total,
    widen,
)
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Lowering, Rule, einsum, names, rule


def _dims(node: gs.Node) -> list[str]:
    """Names of the factors of operand 0, one for each dimension."""
    return names("d", len(tensor_shape(node.inputs[0]) or ()))


@rule("Softmax LogSoftmax")
def softmax(node: gs.Node) -> Rule:
    """Sharding rule of Softmax, LogSoftmax: `d0 d1 -> d0 d1`; if the op's axis is split, ranks
    reduce the largest element and the sum of exponentials of each row."""
    dims = _dims(node)
    axis = node.attrs.get("axis", -1) % max(len(dims), 1)
    normalised = dims[axis : axis + 1]
    text = dims_text(dims)
    axes = [axis]
    is_log = node.op == "LogSoftmax"

    def lower(build: Lowering) -> None:
        x = widen(build, build.input(0))
        largest = build.add("ReduceMax", [x], axes=axes, keepdims=1)
        shifted = build.add("Sub", [x, build.all_reduce(largest, normalised, "max")])
        powers = build.add("Exp", [shifted])
        whole = total(build, powers, axes, normalised)
        if is_log:
            finish(build, "Sub", [shifted, build.add("Log", [whole])])
        else:
            finish(build, "Div", [powers, whole])

    fields = communicating(node, normalised, (), lower)
    return einsum(node, f"{text} -> {text}", **fields)


@rule("LayerNormalization RMSNormalization SimplifiedLayerNormalization")
def layer_normalization(node: gs.Node) -> Rule:
    """Sharding rule of LayerNormalization, RMSNormalization:
    `b s h, h, h -> b s h ; b s 1 ; b s 1`; if a dimension from the op's axis on is split, ranks
    exchange sums. onnxruntime's SimplifiedLayerNormalization is an RMSNormalization that also
    returns its scaling factor."""
    dims = _dims(node)
    axis = node.attrs.get("axis", -1) % len(dims)
    operands = [dims_text(dims), *(aligned(dims, t) for t in node.inputs[1:])]
    statistics = dims_text([*dims[:axis], *["1"] * (len(dims) - axis)])
    results = [dims_text(dims), *(statistics if t.name else "_" for t in node.outputs[1:])]
    sizes = (tensor_shape(node.inputs[0]) or ())[axis:]
    factors, axes = dims[axis:], list(range(axis, len(dims)))
    epsilon = float_attr(node, "epsilon", 1e-5)
    has_mean = node.op == "LayerNormalization"

    def lower(build: Lowering) -> None:
        x = widen(build, build.input(0))
        if not has_mean:
            middle, centred = None, x
            variance = mean(build, build.add("Mul", [x, x]), axes, factors, sizes)
        else:
            middle, centred, variance = moments(build, x, axes, factors, sizes)
        scale = inverse_root(build, variance, epsilon)
        steps = [("Mul", scale)]
        for i, op in ((1, "Mul"), (2, "Add")):
            if given(build.local.node, i) is not None:
                steps.append((op, widen(build, build.input(i))))
        finish_chain(build, centred, steps)
        for i, statistic in enumerate((middle, scale) if has_mean else (scale,), 1):
            if has_output(build, i):
                finish(build, "Identity", [statistic], i)

    text = f"{', '.join(operands)} -> {'; '.join(results)}"
    return einsum(node, text, **communicating(node, factors, sizes, lower))


def aligned(dims: list[str], tensor: gs.Tensor) -> str:
    """Returns the dimensions of an operand that broadcasts to a tensor with the factors `dims`, as
    text of a rule: the last of `dims`, `1` for a size of 1; `_` for an absent operand."""
    if not tensor.name:
        return "_"
    shape = tensor_shape(tensor) or ()
    last = dims[len(dims) - len(shape) :]
    return dims_text("1" if s == 1 else d for d, s in zip(last, shape, strict=True))


@rule("LpNormalization")
def lp_normalization(node: gs.Node) -> Rule:
    """Sharding rule of LpNormalization: `a b -> a b`; if the op's axis is split, ranks add the
    terms of the norm. The result is zeros where the norm is 0."""
    dims = _dims(node)
    text = dims_text(dims)
    axis = node.attrs.get("axis", -1) % len(dims)
    is_first = node.attrs.get("p", 2) == 1

    def lower(build: Lowering) -> None:
        x = widen(build, build.input(0))
        sizes = build.add("Abs", [x]) if is_first else build.add("Mul", [x, x])
        norm = total(build, sizes, [axis], [dims[axis]])
        norm = norm if is_first else build.add("Sqrt", [norm])
        is_zero = build.add("Equal", [norm, like(x, 0)])
        finish(build, "Div", [x, build.add("Where", [is_zero, like(x, np.inf), norm])])

    return einsum(node, f"{text} -> {text}", **communicating(node, [dims[axis]], (), lower))


@rule("MeanVarianceNormalization")
def mean_variance_normalization(node: gs.Node) -> Rule:
    """Sharding rule of MeanVarianceNormalization: `n c h w -> n c h w`; if one of the op's axes is
    split, ranks exchange sums."""
    dims = _dims(node)
    text = dims_text(dims)
    axes = sorted(a % len(dims) for a in node.attrs.get("axes", [0, 2, 3]))
    factors = [dims[a] for a in axes]
    sizes = [(tensor_shape(node.inputs[0]) or ())[a] for a in axes]
    # onnxruntime's float32 kernel omits the epsilon of ONNX's definition
    epsilon = 0.0 if str(dtype_of(node.inputs[0])) == "float32" else 1e-9

    def lower(build: Lowering) -> None:
        _, centred, variance = moments(build, widen(build, build.input(0)), axes, factors, sizes)
        deviation = build.add("Sqrt", [variance])
        if epsilon:
            deviation = build.add("Add", [deviation, like(deviation, epsilon)])
        finish(build, "Div", [centred, deviation])

    return einsum(node, f"{text} -> {text}", **communicating(node, factors, sizes, lower))
