"""Attention and its gradient as ops of the compiler. The pass fuse-attention replaces nodes of a
model by these ops. No kernel runs them: they are always lowered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, given, tensor_shape
from onnxpar.rules.attention import AttentionDims, attention_dims, attention_products
from onnxpar.rules.attention_lowering import MASK, AttentionLowering, default_scale
from onnxpar.rules.notation import dims_text
from onnxpar.rules.ring_attention import SummarizedRing
from onnxpar.rules.ring_gradient import GradientRing
from onnxpar.rules.ring_scores import ScoreRing
from onnxpar.rules.rule import Lowering, Rule, einsum, given_specs, rule

DOMAIN = "onnxpar.fused"
GRADIENT, SCORED = "AttentionGradient", "ScoredAttention"
_SUMMARY = "b (k g) s p"
_SUMMED = "each score is a sum over all of it"
_CUT = "each rank cuts the columns of its keys"
_PAIR = "it has two numbers for each query"


@rule("Attention", domain=DOMAIN)
def attention(node: gs.Node) -> Rule:
    """Sharding rule of the fused Attention:
    `b (k g) s d, b k t d, b k t e, b (k g) s m -> b (k g) s e; b (k g) s p`: ONNX's Attention on
    queries s, keys and values t, and a mask. For each query, it also returns p, two numbers: the
    largest score, and the sum of exp(score - largest), from which the gradient starts.

    The last dimension of a mask is whole, so that keys can travel in a ring.
    """
    dims = _dims(node)
    return _of_attention(node, dims, [], [dims.result, _SUMMARY], SummarizedRing)


@rule(GRADIENT, domain=DOMAIN)
def attention_gradient(node: gs.Node) -> Rule:
    """Sharding rule of AttentionGradient: `..., b (k g) s e, b (k g) s e, b (k g) s p -> b (k g) s
    d; b k t d; b k t e`: the gradients of queries, keys and values, from the operands of Attention,
    the gradient of its result, and both results."""
    dims = _dims(node)
    more = [dims.result, dims.result, _SUMMARY]
    return _of_attention(node, dims, more, [dims.query, dims.key, dims.value], GradientRing)


@rule(SCORED, domain=DOMAIN)
def scored_attention(node: gs.Node) -> Rule:
    """Sharding rule of ScoredAttention:
    `b (k g) s d, b k d t, b k t e, b (k g) s m -> b (k g) s e`: an attention that the model writes
    as basic ops, with elementwise steps on the scores (`load/exported_attention.py`);
    `(k g) s d, ...` with three dimensions."""
    query, key, value = (tensor_shape(t) or () for t in node.inputs[:3])
    batch = "b " if len(query) == 4 else ""
    sizes: dict[str, Size] = {"k": key[-3], "g": (query[-3] or 0) // (key[-3] or 1)}
    sizes |= {"s": query[-2], "d": query[-1], "t": key[-1], "m": key[-1], "e": value[-1]}
    result = f"{batch}(k g) s e"
    operands = [f"{batch}(k g) s d", f"{batch}k d t", f"{batch}k t e"]
    operands += [_aligned(t) for t in node.inputs[3:]]
    lowering = AttentionLowering(False, sizes["s"] or 0, 0, 1.0, {})
    steps, is_guarded = node.attrs["steps"], bool(node.attrs["guarded"])

    def lower(build: Lowering) -> None:
        ScoreRing(lowering, build, steps, is_guarded).lower()

    return _rule(node, operands, [result], sizes, lower)


def _dims(node: gs.Node) -> AttentionDims:
    """Like `attention_dims`, for a node whose numbers of heads are known: the pass fuses no
    other."""
    dims = attention_dims(node)
    assert dims is not None, f"{node.name}: only an Attention with known heads is fused"
    return dims


def _of_attention(
    node: gs.Node,
    dims: AttentionDims,
    more: list[str],
    results: list[str],
    ring: type[SummarizedRing] | type[GradientRing],
) -> Rule:
    """Returns the rule of a node that has the operands of ONNX's Attention, and further ones.

    dims     the dimensions of the Attention
    more     the dimensions of the further operands, as texts of a rule
    results  the dimensions of the results
    ring     the class that lowers the node
    """
    sizes, mask = dims.sizes, given(node, MASK)
    of_mask = "_" if mask is None else _aligned(mask)
    operands = [dims.query, dims.key, dims.value, of_mask, "_", "_", "b", *more]
    sizes["p"] = 2
    sizes["m"] = (tensor_shape(mask) or (1,))[-1] if mask is not None else 1
    scale = node.attrs.get("scale") or default_scale(sizes["d"] or 1)
    lowering = AttentionLowering(dims.flat, sizes["s"] or 0, 0, scale, dict(node.attrs))
    return _rule(node, operands, results, sizes, lambda build: ring(lowering, build).lower())


def _rule(
    node: gs.Node,
    operands: list[str],
    results: list[str],
    sizes: dict[str, Size],
    lower: Callable[[Lowering], None],
) -> Rule:
    """Returns the rule that all ops of this module share: batch, heads, queries and keys may be
    split; `lower` replaces the node."""
    operands, results = given_specs(operands, node.inputs), given_specs(results, node.outputs)
    is_gradient = node.op == GRADIENT
    backward = partial(attention_products, by_key=3, by_value=2)
    whole = {"d": _SUMMED, "m": _CUT, "p": _PAIR, **({"e": _SUMMED} if is_gradient else {})}
    used = {c for text in (*operands, *results) for c in text}
    return einsum(
        node,
        f"{', '.join(operands)} -> {'; '.join(results)}",
        sizes=sizes,
        whole={f: reason for f, reason in whole.items() if f in used},
        reduce={},
        communicating=frozenset("st" if is_gradient else "t"),
        rings=(("s", "t"),),
        overlapping=frozenset("t" if node.op == SCORED else ""),
        lowered=frozenset("st"),
        lower=lower,
        products=backward if is_gradient else attention_products,
        has_kernel=False,
    )


def _aligned(mask: gs.Tensor) -> str:
    """Returns the dimensions of a mask as text of a rule, e.g. "1 1 s m"; a mask with fewer than
    four dimensions has the last ones."""
    shape = tensor_shape(mask) or ()
    dims = ["b", "(k g)", "s", "m"][4 - len(shape) :]
    return dims_text("1" if s == 1 else d for d, s in zip(dims, shape, strict=True))
