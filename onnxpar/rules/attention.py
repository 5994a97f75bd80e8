"""Attention and rotary embeddings, split by batch, head, query or key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, given, tensor_shape
from onnxpar.rules.attention_lowering import LENGTHS, default_scale, sees_by_place
from onnxpar.rules.notation import dims_text
from onnxpar.rules.ring_attention import RingAttention
from onnxpar.rules.rule import FIRST, Local, Rule, einsum, given_specs, rule, whole_rule

_ATTENDED = "each score is a sum over all of it"
_CACHED = "queries attend to the whole cache"


class AttentionDims(NamedTuple):
    """How an Attention node's dimensions share factors, as texts in the notation of sharding rules.

    sizes         the global size of each factor in the texts, e.g. {"b": 2, "k": 8}
    flat          True if heads and head width are one dimension of the tensors:
                  (batch, sequence, hidden)
    query, key, value, result  the dimensions of each tensor, e.g. "b (k g) s d"
    """

    flat: bool
    sizes: dict[str, Size]
    query: str
    key: str
    value: str
    result: str


def attention_dims(node: gs.Node) -> AttentionDims | None:
    """Returns the factors of an Attention's operands and result; None if its numbers of heads, or
    other sizes, are unknown, or if query heads are no multiple of key heads."""
    query, key, value = (tensor_shape(t) or () for t in node.inputs[:3])
    out = tensor_shape(node.outputs[0]) or ()
    flat = len(query) == 3
    heads = node.attrs.get("q_num_heads") if flat else query[1]
    shared = node.attrs.get("kv_num_heads") if flat else key[1]
    if not heads or not shared or None in (*query, *key, *value, *out) or heads % shared:
        return None
    width = {"d": query[-1], "e": value[-1]}
    sizes: dict[str, Size] = {"b": query[0], "k": shared, "g": heads // shared}
    sizes |= {"d": (width["d"] or 0) // heads, "e": (width["e"] or 0) // shared} if flat else width
    sizes |= {"s": query[-2], "t": key[-2]}
    if flat:
        return AttentionDims(flat, sizes, "b s (k g d)", "b t (k d)", "b t (k e)", "b s (k g e)")
    return AttentionDims(flat, sizes, "b (k g) s d", "b k t d", "b k t e", "b (k g) s e")


def attention_products(
    sizes: Mapping[str, Size], seen: str = "t", by_key: int = 1, by_value: int = 1
) -> int:
    """Returns the number of scalar multiplications of an attention, for the cost model: `by_key`
    products of queries with keys (plain attention has one, its gradient more), and `by_value`
    products of weights with values.

    sizes  the size of each factor: b, k, g, s, d, e, and the factor of the keys
    seen   the factor of the keys: "t", or with a cache another one
    """
    width = by_key * (sizes["d"] or 1) + by_value * (sizes["e"] or 1)
    return width * math.prod(
        1 if sizes[v] is None else sizes[v] or 0 for v in (*"bkgs", seen) if v in sizes
    )


LOCAL_HEADS: dict[str | int, Callable[[Local], int]] = {
    "q_num_heads": lambda at: at.size("k") * at.size("g"),
    "kv_num_heads": lambda at: at.size("k"),
}
"""For an Attention on (batch, sequence, hidden): attributes that the rank's node gets, computed
from the sizes of the rank's shards."""


@rule("Attention")
def attention(node: gs.Node) -> Rule:
    """Sharding rule of Attention: `b (k g) s d, b k t d, b k t e -> b (k g) s e`; with three
    dimensions `b s (k g d), ...`.

    b is the batch, s the queries, t the keys, d and e the widths of keys and values. k are the
    heads of keys and values; g are the query heads that share a key head. Caches and masks have the
    same factors. If the same axes split s and t, shards of keys travel in a ring, unless the node
    has a mask or returns scores.
    """
    attended = attention_dims(node)
    if attended is None:
        return whole_rule(node, "a data-dependent number of heads")
    flat, sizes, query, key, value, result = attended
    operands = [query, key, value]
    past = given(node, 4)
    sizes["p"] = 0 if past is None else (tensor_shape(past) or ())[2]
    sizes["u"] = (sizes["p"] or 0) + (sizes["t"] or 0)
    seen = "t" if past is None else "u"
    operands += [_mask(node, sizes, seen), "b k p d", "b k p e", "b"][: len(node.inputs) - 3]
    operands = given_specs(operands, node.inputs)
    results = [result, f"b k {seen} d", f"b k {seen} e", f"b (k g) s {seen}"]
    results = given_specs(results, node.outputs)
    used = {c for text in operands + results for c in text}
    whole = dict.fromkeys("dm", _ATTENDED)
    if past is not None or "m" in used:
        whole |= dict.fromkeys("tpu", _CACHED)
    across = frozenset("t") - whole.keys()
    scale = node.attrs.get("scale") or default_scale(sizes["d"] or 1)
    lengths = sizes["s"] or 0, sizes["p"] or 0
    lowering = RingAttention(flat, *lengths, scale, dict(node.attrs))
    return einsum(
        node,
        f"{', '.join(operands)} -> {'; '.join(results)}",
        sizes=sizes,
        whole={f: reason for f, reason in whole.items() if f in used},
        reduce={},
        local=LOCAL_HEADS if flat else {},
        communicating=across,
        rings=(("s", "t"),) if across and {*operands[3:4], *results[3:]} <= {"_"} else (),
        balanced=bool(node.attrs.get("is_causal")) and given(node, LENGTHS) is None,
        lowered=across | (frozenset("s") if sees_by_place(node.attrs) else frozenset()),
        lower=lowering.lower,
        products=partial(attention_products, seen=seen),
    )


def _mask(node: gs.Node, sizes: dict[str, Size], seen: str) -> str:
    """Returns the mask's dimensions as text of a rule, e.g. "b 1 s t"; `_` without a mask. A mask
    with fewer than four dimensions has the last of these dimensions, as in NumPy's broadcasting.

    sizes  gets the size of the mask's last dimension as factor `m`
    seen   the factor of the keys, which is the mask's last dimension; or, if the op pads a shorter
           mask, that dimension is the separate factor `m`
    """
    mask = given(node, 3)
    if mask is None:
        return "_"
    shape = tensor_shape(mask) or ()
    sizes["m"] = shape[-1] if shape else 1
    last = seen if sizes["m"] == sizes["u"] else "m"
    dims = ["b", "(k g)", "s", last][4 - len(shape) :]
    return dims_text("1" if s == 1 else d for d, s in zip(dims, shape, strict=True))


@rule("RotaryEmbedding")
def rotary_embedding(node: gs.Node) -> Rule:
    """Sharding rule of RotaryEmbedding: `b h s d, b s r, b s r -> b h s d`, or with position ids
    `b h s d, p r, p r, b s`; r is half of the rotated width. Batch, heads and sequence may be
    split, d and r may not."""
    shape, cache = (tensor_shape(t) or () for t in node.inputs[:2])
    heads = node.attrs.get("num_heads") if len(shape) == 3 else shape[1]
    if not heads or shape[-1] is None:
        return whole_rule(node, "a data-dependent number of heads")
    flat = len(shape) == 3
    text = "b s (h d)" if flat else "b h s d"
    sizes: dict[str, Size] = {"h": heads, "d": shape[-1] // heads if flat else shape[-1]}
    angles = "p r" if len(cache) == 2 else "b s r"
    operands = [text, angles, angles, "b s"][: len(node.inputs)]
    operands = given_specs(operands, node.inputs)
    whole = {f: "its elements are rotated in pairs" for f in "dr"}
    if len(cache) == 2:
        whole["p"] = "it is looked up by position"
    return einsum(
        node,
        f"{', '.join(operands)} -> {text}",
        sizes=sizes,
        whole=whole,
        linear=(FIRST,),
        local={"num_heads": lambda at: at.size("h")} if flat else {},
    )
