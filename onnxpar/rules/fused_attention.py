"""Attention and its gradient as ops of the compiler, which a pass puts in the place of the nodes of
a model. No kernel runs them: they are always lowered."""

from __future__ import annotations

from functools import partial

import onnx_graphsurgeon as gs

from onnxpar.ir.tensors import given, tensor_shape
from onnxpar.rules.attention import AttentionDims, attention_dims, attention_products
from onnxpar.rules.attention_lowering import MASK, AttentionLowering, default_scale
from onnxpar.rules.notation import dims_text
from onnxpar.rules.ring_attention import SummarizedRing
from onnxpar.rules.ring_gradient import DY, GradientRing
from onnxpar.rules.rule import Rule, einsum, given_specs, rule

DOMAIN = "onnxpar.fused"
GRADIENT = "AttentionGradient"
_SUMMARY = "b (k g) s 1"
_SUMMED = "each score is a sum over all of it"
_CUT = "each rank cuts the columns of its keys"


@rule("Attention", domain=DOMAIN)
def attention(node: gs.Node) -> Rule:
    """`b (k g) s d, b k t d, b k t e, b (k g) s m -> b (k g) s e; b (k g) s 1`: ONNX's Attention,
    and the logarithm of the sum of exponentials for each query.

    The last dimension of a mask is whole, so that keys can travel in a ring.
    """
    dims = _dims(node)
    return _rule(node, dims, [], [dims.result, _SUMMARY], SummarizedRing)


@rule(GRADIENT, domain=DOMAIN)
def attention_gradient(node: gs.Node) -> Rule:
    """`..., b (k g) s e, b (k g) s e, b (k g) s 1 -> b (k g) s d; b k t d; b k t e`: the gradients
    of queries, keys and values, from the operands of Attention, the gradient of its result, and
    both results."""
    dims = _dims(node)
    more = [dims.result, dims.result, _SUMMARY]
    return _rule(node, dims, more, [dims.query, dims.key, dims.value], GradientRing)


def _dims(node: gs.Node) -> AttentionDims:
    found = attention_dims(node)
    assert found is not None, f"{node.name}: only an Attention with known heads is fused"
    return found


def _rule(
    node: gs.Node,
    dims: AttentionDims,
    more: list[str],
    results: list[str],
    ring: type[SummarizedRing] | type[GradientRing],
) -> Rule:
    sizes = dims.sizes
    operands = [dims.query, dims.key, dims.value, _mask(node), "_", "_", "b", *more]
    operands = given_specs(operands, node.inputs)
    mask = given(node, MASK)
    sizes["m"] = (tensor_shape(mask) or (1,))[-1] if mask is not None else 1
    scale = node.attrs.get("scale") or default_scale(sizes["d"] or 1)
    is_gradient = len(node.inputs) > DY
    backward = partial(attention_products, by_key=3, by_value=2)
    lowering = AttentionLowering(dims.flat, sizes["s"] or 0, 0, scale, dict(node.attrs))
    whole = {"d": _SUMMED, "m": _CUT, **({"e": _SUMMED} if is_gradient else {})}
    used = {c for text in operands for c in text}
    return einsum(
        node,
        f"{', '.join(operands)} -> {'; '.join(given_specs(results, node.outputs))}",
        sizes=sizes,
        whole={f: reason for f, reason in whole.items() if f in used},
        reduce={},
        communicating=frozenset("st" if is_gradient else "t"),
        rings=(("s", "t"),),
        lowered=frozenset("st"),
        lower=lambda build: ring(lowering, build).lower(),
        products=backward if is_gradient else attention_products,
        has_kernel=False,
    )


def _mask(node: gs.Node) -> str:
    """The mask's dimensions as rule text, aligned at the last one."""
    mask = given(node, MASK)
    shape = tensor_shape(mask) or () if mask is not None else ()
    dims = ["b", "(k g)", "s", "m"][4 - len(shape) :]
    return dims_text("1" if s == 1 else d for d, s in zip(dims, shape, strict=True))
