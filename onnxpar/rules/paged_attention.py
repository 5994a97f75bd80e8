"""PagedAttention: heads are split, as in GroupQueryAttention; a rank has the pages of its own."""

from __future__ import annotations

from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.ir.paged_attention import (
    COMPUTE,
    COSINE,
    KEYS,
    PAGED_ATTENTION,
)
from onnxpar.ir.tensors import Size, given, tensor_shape
from onnxpar.rules.attention import attention_products
from onnxpar.rules.rule import Rule, einsum, given_specs, rule, whole_rule

_APART = "each token has a place of its own in the caches"
_TABLE = "the table of pages is read by text and position"
_POSITIONS = "it is looked up by position"
_PAIRS = "its elements are rotated in pairs"


@rule(PAGED_ATTENTION, domain=COMPUTE)
def paged_attention(node: gs.Node) -> Rule:
    """`1 s (k g d), 1 s (k d), 1 s (k d), n k p e, n k p e, r m, s, s, q c, q c, (k g) ->
    1 s (k g d); n k p e; n k p e`. Keys and values may be packed into the query."""
    heads, shared = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    cache = tensor_shape(node.inputs[KEYS]) or (None,) * 4
    if None in cache[1:]:
        return whole_rule(node, "the width of its heads is not known")
    packed = given(node, 1) is None
    operands = [
        "1 s (k g d) + (k d) + (k d)" if packed else "1 s (k g d)",
        "1 s (k d)",
        "1 s (k d)",
    ]
    operands += ["n k p e", "n k p e", "r m", "s", "s", "q c", "q c", "(k g)"]
    sizes: dict[str, Size] = {"k": shared, "g": heads // shared, "e": cache[3]}
    sizes["d"] = (cache[3] or 0) - node.attrs.get("scale_bytes", 0)
    whole = {
        "s": _APART,
        "n": _TABLE,
        "p": _TABLE,
        "r": _TABLE,
        "m": _TABLE,
        "d": _PAIRS,
        "e": _PAIRS,
    }
    if given(node, COSINE) is not None:
        whole |= {"q": _POSITIONS, "c": _PAIRS}
    local: dict[str | int, Any] = {
        "num_heads": lambda at: at.size("k") * at.size("g"),
        "kv_num_heads": lambda at: at.size("k"),
    }
    left = ", ".join(given_specs(operands[: len(node.inputs)], node.inputs))
    return einsum(
        node,
        f"{left} -> 1 s (k g d); n k p e; n k p e",
        sizes=sizes,
        whole=whole,
        reduce={},
        local=local,
        products=lambda local: attention_products({**local, "b": 1, "e": local["d"]}, "m"),
    )
