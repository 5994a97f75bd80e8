"""onnxruntime's own attention ops: batch and heads may be split; the sequence of keys and values
must stay whole, except in ops with a lowering."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, given, tensor_shape
from onnxpar.rules.contrib_attention_lowering import split_keys
from onnxpar.rules.notation import dims_text, parse_spec
from onnxpar.rules.projected_attention import OPERANDS, ProjectedAttention
from onnxpar.rules.rule import FIRST, Rule, einsum, rule, whole_rule

DOMAIN = "com.microsoft"
_SUMMED = "each score is a sum over all of it"
_ATTENDED = "every query attends to all of it"
_OPEN = "a data-dependent number of heads"
_STACKED = "it stacks keys and values"
_POSITIONS = "positions are counted from its start"


def _shape(node: gs.Node, index: int) -> tuple[Size, ...]:
    tensor = given(node, index)
    return () if tensor is None else tensor_shape(tensor) or ()


def _stated(
    node: gs.Node,
    operands: Mapping[int, str],
    results: Mapping[int, str],
    whole: Mapping[str, str],
    **fields: Any,
) -> Rule:
    """Returns the rule with these dimensions of operands and results; if a tensor has another
    number of dimensions, a rule that keeps the node whole.

    operands, results  index of a tensor to its dimensions, e.g. {0: "b s (n d)"}; dimensions of
                       size 1 are broadcast, except in texts with ( or +
    whole              factors that must not be split, with the reason
    """

    def text(tensor: gs.Tensor, dims: str | None) -> str:
        if not tensor.name or dims is None:
            return "_"
        if "(" in dims or "+" in dims:
            return dims
        shape = tensor_shape(tensor) or ()
        return dims_text("1" if s == 1 else d for d, s in zip(dims.split(), shape, strict=True))

    for tensors, texts in ((node.inputs, operands), (node.outputs, results)):
        for i, tensor in enumerate(tensors):
            rank, said = len(tensor_shape(tensor) or ()), texts.get(i)
            spec = parse_spec(said) if tensor.name and said is not None else None
            if spec is not None and len(spec) != rank:
                return whole_rule(node, f"'{tensor.name}' has {rank} dimensions, not {len(spec)}")
    left = ", ".join(text(t, operands.get(i)) for i, t in enumerate(node.inputs))
    right = "; ".join(text(t, results.get(i)) for i, t in enumerate(node.outputs))
    used = {c for c in left + right if c.isalpha()}
    reasons = {f: why for f, why in whole.items() if f in used}
    return einsum(node, f"{left} -> {right}", whole=reasons, reduce={}, **fields)


def _bias(node: gs.Node, index: int, heads: str) -> str:
    """Returns the dimensions of operand `index`, which is added to the scores, as text of a rule,
    e.g. "1 n s t"; dimensions of size 1 are broadcast. `heads` is the factor of the heads."""
    shape = _shape(node, index)
    names = ["b", heads, "s", "t"][4 - len(shape) :]
    return dims_text("1" if s == 1 else d for d, s in zip(names, shape, strict=True))


def _key_mask(shape: tuple[Size, ...], batch: Size) -> str | None:
    """Returns the dimensions of a padding mask as text of a rule, e.g. "b t"; None for a vector of
    positions in the whole batch."""
    if len(shape) == 1:
        return "b" if shape[0] == batch else None
    return {2: "b t", 3: "b s t", 4: "b 1 m w"}[len(shape)]


@rule("Attention QAttention", domain=DOMAIN)
def attention(node: gs.Node) -> Rule:
    """Sharding rule of Attention, QAttention:
    `b s h, h (n d) + (n d) + (n e), (n d) + (n d) + (n e) -> b s (n e)`: input, weight and bias; in
    the latter, the columns of queries, keys and values follow each other. n are the heads. d must
    stay whole. If h is split, the ranks add their projections; if s is split, they gather keys and
    values."""
    at = OPERANDS[node.op]
    image, weight, out = _shape(node, 0), _shape(node, 1), tensor_shape(node.outputs[0]) or ()
    heads = node.attrs["num_heads"]
    if None in (*image, *weight, *out) or node.attrs.get("past_present_share_buffer"):
        return whole_rule(node, _OPEN)
    hidden = node.attrs.get("qkv_hidden_sizes") or [(weight[1] or 0) // 3] * 3
    sizes: dict[str, Size] = {"n": heads, "d": hidden[0] // heads, "e": hidden[2] // heads}
    if hidden[0] != hidden[1]:
        return whole_rule(node, "queries and keys differ in width")
    columns = "(n d) + (n d) + (n e)"
    mask = _key_mask(_shape(node, at.mask), image[0]) if given(node, at.mask) else None
    operands = {0: "b s h", 1: f"h {columns}", 2: columns, at.past: "z b n p d"}
    if mask is not None:
        operands[at.mask] = mask
    if at.added and given(node, at.added):
        operands[at.added] = _bias(node, at.added, "n")
    for i in (*(at.scales or ()), *(at.zeros or ())):
        if _shape(node, i) == (weight[1],):
            operands[i] = columns
    whole = {"d": _SUMMED, "z": _STACKED, **dict.fromkeys("ptumw", _ATTENDED)}
    if given(node, at.past) is not None or len(node.outputs) > 1:
        whole["e"] = _STACKED
    fields: dict[str, Any] = {}
    if node.attrs.get("do_rotary"):
        whole |= dict.fromkeys("hs", "its queries and keys are rotated inside the op")
    elif given(node, at.mask) is not None and mask is None:
        whole |= dict.fromkeys("bhs", "its mask has positions in the whole batch")
    else:
        split = frozenset("hs")
        lower = ProjectedAttention(at, dict(node.attrs)).lower
        fields = {"communicating": split, "lowered": split, "lower": lower}
        fields["contiguous"] = frozenset("s")
    local: dict[str | int, Any] = {"num_heads": lambda at: at.size("n")}
    if node.op == "Attention":
        local["qkv_hidden_sizes"] = lambda at: [at.size("n") * at.size(f) for f in "dde"]
    else:
        whole["e"] = "the op has one width for queries, keys and values"
    results = {0: "b s (n e)", 1: "z b n u d"}
    return _stated(node, operands, results, whole, sizes=sizes, local=local, **fields)


@rule("MultiHeadAttention", domain=DOMAIN)
def multi_head_attention(node: gs.Node) -> Rule:
    """Sharding rule of MultiHeadAttention:
    `b s (n d), b t (n d), b t (n e), (n d) + (n d) + (n e) -> b s (n e)`: d must stay whole; with a
    cache, so must e and t. If the keys t are split, the ranks exchange the largest score and the
    sum of exponentials of each row."""
    query, key, value = (_shape(node, i) for i in range(3))
    out, heads = tensor_shape(node.outputs[0]) or (), node.attrs["num_heads"]
    if None in (*query, *key, *value, *out) or any(given(node, i) for i in (8, 9)):
        return whole_rule(node, _OPEN)
    if len(query) == 5 or len(key) == 5:
        return whole_rule(node, "onnxruntime has no CPU kernel for packed queries or keys")
    sizes: dict[str, Size] = {"n": heads, "d": (query[2] or 0) // heads}
    sizes["e"] = (out[2] or 0) // heads
    keys = ("b t (n d)", "b t (n e)") if len(key) == 3 else ("b n t d", "b n t e")
    operands = {0: "b s (n d)", 1: keys[0], 2: keys[1]}
    operands |= {3: "(n d) + (n d) + (n e)", 6: "b n p d", 7: "b n p e"}
    whole = dict.fromkeys("deptu", _ATTENDED) | {"d": _SUMMED}
    keyed = split_keys(node, sizes["d"] or 1)
    if given(node, 4) is not None:
        mask = _key_mask(_shape(node, 4), query[0])
        if mask is None:
            keyed = {}
            whole["b"] = "its mask has positions in the whole batch"
        else:
            past = _shape(node, 6)
            operands[4] = mask.replace("t", "u") if past else mask
    if given(node, 5) is not None:
        operands[5] = _bias(node, 5, "n").replace("t", "u" if _shape(node, 6) else "t")
    if keyed:
        split = "te" if len(key) == 3 else "t"  # the kernel wants keys and values of one shape
        whole = {f: why for f, why in whole.items() if f not in split}
    elif node.attrs.get("unidirectional"):
        whole["s"] = _ATTENDED
    total = "u" if _shape(node, 6) else "t"
    results = {0: "b s (n e)", 1: f"b n {total} d", 2: f"b n {total} e", 3: f"b n s {total}"}
    local: dict[str | int, Any] = {"num_heads": lambda at: at.size("n")}
    return _stated(node, operands, results, whole, sizes=sizes, local=local, **keyed)


@rule("DecoderMaskedMultiHeadAttention", domain=DOMAIN)
def decoder_masked_attention(node: gs.Node) -> Rule:
    """Sharding rule of DecoderMaskedMultiHeadAttention: `b 1 (n d), b 1 (n d), b 1 (n e), b u, b n
    1 u, b n p d, b n p e -> b 1 (n e)`, for one new token, with n heads and a cache of p tokens.

    Keys may come from an encoder, `b n t d`. In beam search, b must stay whole, because beams refer
    to rows of the whole batch.
    """
    query, key, value = (_shape(node, i) for i in range(3))
    out, heads = tensor_shape(node.outputs[0]) or (), node.attrs["num_heads"]
    if not key or not value or None in (*query, *key, *value, *out):
        return whole_rule(node, _OPEN)
    sizes: dict[str, Size] = {"n": heads, "d": (query[2] or 0) // heads}
    sizes["e"] = (out[2] or 0) // heads
    keys = ("b s (n d)", "b s (n e)") if len(key) == 3 else ("b n t d", "b n t e")
    operands = {0: "b s (n d)", 1: keys[0], 2: keys[1], 3: "b m", 5: "b n p d", 6: "b n p e"}
    operands |= {9: "b x y", 10: "(n d) + (n d) + (n e)"}
    if given(node, 4) is not None:
        operands[4] = _bias(node, 4, "n").replace("t", "m")
    cached = "p" if node.attrs.get("past_present_share_buffer") else "u"
    results = {0: "b s (n e)", 1: f"b n {cached} d", 2: f"b n {cached} e", 3: "b n s v"}
    whole = dict.fromkeys("demptuvxy", _ATTENDED)
    if given(node, 8) is not None or given(node, 9) is not None:
        whole["b"] = "beams refer to rows of the whole batch"
    local: dict[str | int, Any] = {"num_heads": lambda at: at.size("n")}
    return _stated(node, operands, results, whole, sizes=sizes, local=local)


@rule("GroupQueryAttention", domain=DOMAIN)
def group_query_attention(node: gs.Node) -> Rule:
    """Sharding rule of GroupQueryAttention: `b s (k g d), b t (k d), b t (k d), b k p d, b k p d, b
    -> b s (k g d) ; b k u d ; b k u d`.

    k are the heads of keys and values; g are the query heads that share a key head; p and u are the
    lengths of the cache before and after a run. Keys and values may be packed into the query.
    """
    heads, shared = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    query, out = _shape(node, 0), tensor_shape(node.outputs[0]) or ()
    if None in (query[2], out[2]):
        return whole_rule(node, _OPEN)
    if any(node.attrs.get(key, "NONE") != "NONE" for key in ("k_quant_type", "v_quant_type")):
        return whole_rule(node, "the cache is quantized")
    packed = given(node, 1) is None
    sizes: dict[str, Size] = {"k": shared, "g": heads // shared, "d": (out[2] or 0) // heads}
    operands = {0: "b s (k g d) + (k d) + (k d)" if packed else "b s (k g d)"}
    lengths = "b 1" if len(_shape(node, 5)) == 2 else "b"  # older exporters write [batch, 1]
    operands |= {1: "b t (k d)", 2: "b t (k d)", 3: "b k p d", 4: "b k p d", 5: lengths}
    operands |= {7: "m r", 8: "m r", 9: "b s", 11: "(k g)", 14: "d", 15: "d"}
    if given(node, 10) is not None:
        operands[10] = _bias(node, 10, "(k g)")
    results = {0: "b s (k g d)", 1: "b k u d", 2: "b k u d", 3: "b (k g) s v"}
    whole = dict.fromkeys("sdptuv", _ATTENDED) | dict.fromkeys("mr", _POSITIONS)
    local: dict[str | int, Any] = {
        "num_heads": lambda at: at.size("k") * at.size("g"),
        "kv_num_heads": lambda at: at.size("k"),
    }
    return _stated(node, operands, results, whole, sizes=sizes, local=local)


@rule("RotaryEmbedding", domain=DOMAIN)
def rotary_embedding(node: gs.Node) -> Rule:
    """Sharding rule of RotaryEmbedding: `b s (h d), b s, m r, m r -> b s (h d)`, or with `b h s d`.
    If there is a single position id, it is the position of the first token, and the kernel counts
    on from there, so s must stay whole."""
    shape, cache = _shape(node, 0), _shape(node, 2)
    flat = len(shape) == 3
    if shape[-1] is None or cache[-1] is None or node.attrs.get("is_packed_batching"):
        return whole_rule(node, _OPEN)
    heads = node.attrs.get("num_heads") or shape[-1] // (2 * cache[-1])
    text = "b s (h d)" if flat else "b h s d"
    sizes: dict[str, Size] = {"h": heads, "d": shape[-1] // heads} if flat else {}
    whole = dict.fromkeys("dr", "its elements are rotated in pairs") | {"m": _POSITIONS}
    counted = len(_shape(node, 1)) == 1
    if counted:
        whole["s"] = _POSITIONS
    operands = {0: text, 1: "s" if counted else "b s", 2: "m r", 3: "m r"}
    stated = flat and node.attrs.get("num_heads")
    local: dict[str | int, Any] = {"num_heads": lambda at: at.size("h")} if stated else {}
    return _stated(node, operands, {0: text}, whole, sizes=sizes, local=local, linear=(FIRST,))
