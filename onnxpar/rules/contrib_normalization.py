"""onnxruntime's own normalizations, alone or fused with an addition or a gate; if the normalized
dimension is split, ranks exchange sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, float_attr, given, tensor_shape
from onnxpar.rules.communicate import (
    communicating,
    finish,
    finish_chain,
    has_output,
    inverse_root,
    mean,
    moments,
    number,
    widen,
)
from onnxpar.rules.movement import int64
from onnxpar.rules.normalization import aligned
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, given_specs, names, rule, whole_rule

DOMAIN = "com.microsoft"
_UNKNOWN = "the size of what it normalises is unknown"


def _shape(node: gs.Node, index: int) -> tuple[Size, ...]:
    """The shape of an operand; () without that operand."""
    tensor = given(node, index)
    return () if tensor is None else tensor_shape(tensor) or ()


@rule("SkipLayerNormalization SkipSimplifiedLayerNormalization", domain=DOMAIN)
def skip_layer_normalization(node: gs.Node) -> Rule:
    """Sharding rule of SkipLayerNormalization:
    `b s h, b s h, h, h, h -> b s h ; _ ; _ ; b s h {communicating: h}`: adds two tensors
    (and a bias), and normalizes the sum along h; if h is split, ranks exchange sums."""
    if any(t.name for t in node.outputs[1:3]):
        return whole_rule(node, "its statistics are outputs")
    dims = names("d", len(_shape(node, 0)))
    text, axis = dims_text(dims), len(dims) - 1
    is_simple = node.op != "SkipLayerNormalization"
    bias = 3 if is_simple else 4

    def lower(build: Lowering) -> None:
        x = build.add("Add", [widen(build, build.input(i)) for i in (0, 1)])
        if given(node, bias) is not None:
            x = build.add("Add", [x, widen(build, build.input(bias))])
        steps = [("Mul", widen(build, build.input(2)))]
        if not is_simple and given(node, 3) is not None:
            steps.append(("Add", widen(build, build.input(3))))
        _normalize(build, x, axis, dims[-1], _shape(node, 0)[-1], steps, is_simple)
        if has_output(build, 3):
            finish(build, "Identity", [x], 3)

    operands = ", ".join([text, *(aligned(dims, t) for t in node.inputs[1:])])
    results = "; ".join(text if t.name else "_" for t in node.outputs)
    fields = communicating(node, dims[-1:], _shape(node, 0)[-1:], lower)
    return einsum(node, f"{operands} -> {results}", **fields)


def _normalize(
    build: Lowering,
    x: gs.Tensor,
    axis: int,
    factor: str,
    size: Size,
    steps: list[tuple[str, Any]],
    is_simple: bool,
) -> None:
    """Makes result 0 of the node: `x` normalized along a dimension, then the chain `steps` of
    (op, second operand).

    axis       the dimension
    factor     its factor
    size       its global size
    is_simple  True if only the scale is normalized (RMS), and the mean is not subtracted
    """
    centred = x
    if is_simple:
        variance = mean(build, build.add("Mul", [x, x]), [axis], [factor], [size])
    else:
        _, centred, variance = moments(build, x, [axis], [factor], [size])
    epsilon = float_attr(build.local.node, "epsilon", 1e-12)
    finish_chain(build, centred, [("Mul", inverse_root(build, variance, epsilon)), *steps])


@rule("GatedRMSNorm", domain=DOMAIN)
def gated_normalization(node: gs.Node) -> Rule:
    """Sharding rule of GatedRMSNorm: `b s (n c), c, b s (n c) -> b s (n c) {communicating: c}`:
    operand, scale, gate; n groups of c elements are normalized separately."""
    shape, (width,) = _shape(node, 0), _shape(node, 1)
    if not width or shape[-1] is None:
        return whole_rule(node, _UNKNOWN)
    lead = names("d", len(shape) - 1)
    groups = shape[-1] // width
    text = dims_text([*lead, "(n c)" if groups > 1 else "c"])
    is_plain = node.attrs.get("activation", "silu") in ("sigmoid", b"sigmoid")

    def lower(build: Lowering) -> None:
        x, gate = (_apart(build, i, len(lead), "n" if groups > 1 else "", "c") for i in (0, 2))
        share = mean(build, build.add("Mul", [x, x]), [len(lead) + 1], ["c"], [width])
        scale = inverse_root(build, share, float_attr(node, "epsilon", 1e-5))
        x = build.add("Mul", [build.add("Mul", [x, scale]), widen(build, build.input(1))])
        opened = build.add("Sigmoid", [gate])
        opened = opened if is_plain else build.add("Mul", [gate, opened])
        y = build.add("Mul", [x, opened])
        _finish_joined(build, y, len(lead), "n" if groups > 1 else "", "c")

    fields = communicating(node, ["c"], [width], lower)
    fields["nonempty"] = frozenset("nc") if groups > 1 else frozenset("c")
    sizes: dict[str, Size] = {"n": groups, "c": width}
    return einsum(node, f"{text}, c, {text} -> {text}", sizes=sizes, **fields)


def _apart(build: Lowering, index: int, lead: int, group: str, within: str) -> gs.Tensor:
    """Returns operand `index` in float32, its last dimension cut in two: (group, elements of a
    group).

    lead    the number of dimensions before it
    group   the factor of the groups; empty for one group
    within  the factor of the elements of a group
    """

    def shape(local: Local) -> Any:
        return int64([*[0] * lead, local.size(group) if group else 1, local.size(within)])

    return build.add("Reshape", [widen(build, build.input(index)), build.per_rank(shape)])


def _finish_joined(build: Lowering, x: gs.Tensor, lead: int, group: str, within: str) -> None:
    """Makes result 0 of the node from `x`, whose last two dimensions become one: the inverse of
    `_apart`.

    lead    the number of dimensions before these two
    group   the factor of the first of them; empty for one group
    within  the factor of the second of them
    """

    def shape(local: Local) -> Any:
        return int64([*[0] * lead, (local.size(group) if group else 1) * local.size(within)])

    finish(build, "Reshape", [x, build.per_rank(shape)])


@rule("BranchwiseRMSNorm", domain=DOMAIN)
def branchwise_normalization(node: gs.Node) -> Rule:
    """Sharding rule of BranchwiseRMSNorm: `b s c h, c h -> b s c h {communicating: h}`, or flat,
    `b s (c h)`: each branch c is normalized along its features h."""
    shape, branches = _shape(node, 0), int(node.attrs.get("num_branches", 0))
    lead = names("d", len(shape) - (1 if branches else 2))
    count, width = shape[-2:] if not branches else (branches, shape[-1])
    if not count or width is None:
        return whole_rule(node, _UNKNOWN)
    width = width // branches if branches else width
    sizes: dict[str, Size] = {"c": count, "h": width}
    text = dims_text([*lead, *(["(c h)"] if branches else ["c", "h"])])
    scale = _shape(node, 1)
    joined = "h" if scale[:1] == (width,) else "(c h)"
    specs = [text, "c h" if len(scale) == 2 else joined]

    def lower(build: Lowering) -> None:
        x = _apart(build, 0, len(lead), "c", "h")
        share = mean(build, build.add("Mul", [x, x]), [len(lead) + 1], ["h"], [width])
        root = inverse_root(build, share, float_attr(node, "epsilon", 1e-5))
        x = build.add("Mul", [x, root])
        if given(node, 1) is not None:
            is_flat = specs[1] == "(c h)"
            weight = _apart(build, 1, 0, "c", "h") if is_flat else widen(build, build.input(1))
            x = build.add("Mul", [x, weight])
        if branches:
            _finish_joined(build, x, len(lead), "c", "h")
        else:
            finish(build, "Identity", [x])

    operands = ", ".join(given_specs(specs, node.inputs))
    local: dict[str | int, Any] = {"num_branches": lambda at: at.size("c")} if branches else {}
    fields = communicating(node, ["h"], [width], lower)
    fields["nonempty"] = frozenset("ch")
    return einsum(node, f"{operands} -> {text}", sizes=sizes, local=local, **fields)


@rule("EngramGate", domain=DOMAIN)
def engram_gate(node: gs.Node) -> Rule:
    """Sharding rule of EngramGate:
    `b s c h, b s c h, b s h, c h, c h -> b s c h {communicating: h}`: key, query, value and the
    scales of key and query. If h is split, one all-reduce adds sums of squares and of products."""
    specs = ["b s c h", "b s c h", "b s h", "c h", "c h", "c h"]
    operands = ", ".join(given_specs(specs, node.inputs))
    results = "; ".join("b s c h" if t.name else "_" for t in node.outputs)
    width = _shape(node, 0)[-1]

    def lower(build: Lowering) -> None:
        _EngramGate(build, width).lower()

    return einsum(node, f"{operands} -> {results}", **communicating(node, ["h"], [width], lower))


class _EngramGate:
    """Builds the nodes that a rank runs in place of one EngramGate whose features h are split.
    `width` is the global number of features."""

    def __init__(self, build: Lowering, width: Size) -> None:
        self.build = build
        self.inputs = [widen(build, build.input(i)) for i in range(len(build.local.node.inputs))]
        self.width = number(build, width or 0, np.float32)

    def lower(self) -> None:
        """Computes the gate from the normalized product of key and query, and makes result 0 the
        gated value, and result 1 that value normalized."""
        build, (key, query, value, *scales) = self.build, self.inputs
        scaled = [build.add("Mul", [x, s]) for x, s in zip((key, query), scales, strict=False)]
        sums = [self._sum(a, b) for a, b in ((key, key), (query, query), (scaled[0], scaled[1]))]
        joined = build.all_reduce(build.add("Concat", sums, axis=3), ["h"])
        *squares, product = build.add_each("Split", [joined], 3, axis=3, split=[1] * 3)
        roots = build.add("Mul", [self._inverse(part) for part in squares])
        product = build.add("Mul", [roots, product])
        product = build.add("Div", [product, build.add("Sqrt", [self.width])])
        size = build.add("Max", [build.add("Abs", [product]), np.float32(1e-6)])
        bent = build.add("Mul", [build.add("Sign", [product]), build.add("Sqrt", [size])])
        value = build.add("Unsqueeze", [value], axes=[2])
        gated = build.add("Mul", [build.add("Sigmoid", [bent]), value])
        finish(build, "Identity", [gated])
        if has_output(build, 1):
            squared = build.all_reduce(self._sum(gated, gated), ["h"])
            finish(build, "Mul", [build.add("Mul", [gated, self._inverse(squared)]), scales[2]], 1)

    def _sum(self, a: gs.Tensor, b: gs.Tensor) -> gs.Tensor:
        """Returns the sum of the products a * b over the rank's features, before ranks add their
        sums."""
        return self.build.add("ReduceSum", [self.build.add("Mul", [a, b])], axes=[3], keepdims=1)

    def _inverse(self, squares: gs.Tensor) -> gs.Tensor:
        """Returns 1 / sqrt(squares / width + epsilon), from the global sum of squares."""
        epsilon = float_attr(self.build.local.node, "epsilon", 1e-5)
        return inverse_root(self.build, self.build.add("Div", [squares, self.width]), epsilon)
