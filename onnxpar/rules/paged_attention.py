"""Rule of PagedAttention, whose keys and values lie in pages of a cache: split by heads, as
GroupQueryAttention, or by the positions of each page.

A rank with some positions attends to these positions; ranks combine their results by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.paged_attention import (
    ATTRIBUTES,
    COMPUTE,
    COSINE,
    HELD,
    KEYS,
    PAGED_ATTENTION,
    PAGED_ATTENTION_PART,
)
from onnxpar.graph.tensors import Size, given, tensor_shape
from onnxpar.rules.attention import attention_products
from onnxpar.rules.communicate import finish
from onnxpar.rules.movement import int64
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, given_specs, rule, whole_rule

_APART = "each token has a place of its own in the caches"
_TABLE = "the table of pages is read by text and position"
_POSITIONS = "it is looked up by position"
_PAIRS = "its elements are rotated in pairs"


@rule(PAGED_ATTENTION, domain=COMPUTE)
def paged_attention(node: gs.Node) -> Rule:
    """Sharding rule of PagedAttention: `1 s (k g d), 1 s (k d), 1 s (k d), n k p e, n k p e, r m,
    s, s, q c, q c, (k g) -> 1 s (k g d); n k p e; n k p e`: tokens s, g query heads for each key
    head k, n pages of p positions. Keys and values may be packed into the query."""
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
        "r": _TABLE,
        "m": _TABLE,
        "d": _PAIRS,
        "e": _PAIRS,
    }
    if given(node, COSINE) is not None:
        whole |= {"q": _POSITIONS, "c": _PAIRS}
    left = ", ".join(given_specs(operands[: len(node.inputs)], node.inputs))
    return einsum(
        node,
        f"{left} -> 1 s (k g d); n k p e; n k p e",
        sizes=sizes,
        whole=whole,
        reduce={},
        local=_LOCAL,
        communicating=frozenset("p"),
        lowered=frozenset("p"),
        lower=_attend_to_parts,
        products=_products,
    )


def _heads(local: Local) -> int:
    """The number of query heads on the rank."""
    return local.size("k") * local.size("g")


_LOCAL: dict[str | int, Any] = {
    "num_heads": _heads,
    "kv_num_heads": lambda local: local.size("k"),
}


def _products(sizes: Mapping[str, Size]) -> int:
    """Returns the number of multiplications, for the cost model, over all positions of the pages
    that the table names."""
    seen = (sizes["m"] or 1) * (sizes["p"] or 0)
    return attention_products({**sizes, "b": 1, "e": sizes["d"], "t": seen})


def _attend_to_parts(build: Lowering) -> None:
    """Called if the positions of pages are split: attends to the rank's positions. For each token
    and head, ranks then find the largest log-sum of exponentials, weight their results by
    e^(log-sum - largest), add them, and divide by the sum of weights."""
    node, local = build.local.node, build.local
    (_, tokens, _), heads = build.shape(build.input(0)), _heads(local)
    width, page = local.size("d"), local.node.inputs[KEYS].shape[2]
    held = build.per_rank(lambda at: at.positions("p").astype(np.int64))
    operands = [build.input(i) for i in range(len(node.inputs))]
    operands += [gs.Variable.empty()] * (HELD - len(operands))
    attrs = {k: v for k, v in node.attrs.items() if k in ATTRIBUTES} | _LOCAL
    mean, _, _, log_sum = build.make_each(
        PAGED_ATTENTION_PART,
        [*operands, held],
        [(np.float32, [1, tokens, heads * width]), 1, 2, (np.float32, [1, tokens, heads])],
        domain=COMPUTE,
        page_size=page,
        **attrs,
    )
    largest = build.all_reduce(log_sum, "p", "max")
    weight = build.add("Exp", [build.add("Sub", [log_sum, largest])])
    weight = build.add("Unsqueeze", [weight], axes=[3])
    apart = build.per_rank(lambda at: int64([0, 0, _heads(at), at.size("d")]))
    mean = build.add("Mul", [build.add("Reshape", [mean, apart]), weight])
    both = build.all_reduce(build.add("Concat", [mean, weight], axis=3), "p")
    mean, total = build.add_each("Split", [both], 2, axis=3, split=[width, 1])
    flat = build.per_rank(lambda at: int64([0, 0, _heads(at) * at.size("d")]))
    finish(build, "Reshape", [build.add("Div", [mean, total]), flat])
