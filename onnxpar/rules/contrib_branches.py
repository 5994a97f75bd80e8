"""onnxruntime's ops of hyper-connections and of multimodal rotary positions, and products with
weights whose blocks continue across rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import given, tensor_shape
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Local, Rule, einsum, given_specs, names, rule, whole_rule

DOMAIN = "com.microsoft"
ROWS = "the op computes over whole rows"


def _rank(tensor: gs.Tensor) -> int:
    return len(tensor_shape(tensor) or ())


@rule("MatMulBnb4", domain=DOMAIN)
def packed_product(node: gs.Node) -> Rule:
    """Sharding rule of MatMulBnb4: `m0 k, (n w), (n z) -> m0 n`: the weight is a vector with w
    bytes for each column n, which has z scales. A weight whose blocks continue from one column to
    the next stays whole."""
    rank = _rank(node.inputs[0])
    if rank < 2 or node.attrs.get("training_mode"):
        return whole_rule(node, "a single row")
    rows = dims_text(names("m", rank - 1))
    columns, width, block = (int(node.attrs[key]) for key in ("N", "K", "block_size"))
    if width % block or width % 2:
        why = "blocks of the weight run on from one column to the next"
        skipped = ", _" * (len(node.inputs) - 1)
        return einsum(node, f"{rows} k{skipped} -> {rows} n", whole={"k": why, "n": why})
    return einsum(
        node,
        f"{rows} k, (n w), (n z) -> {rows} n",
        sizes={"n": columns, "w": width // 2, "z": width // block},
        whole={
            "k": "the scales of a column are in one vector",
            "w": "its elements are packed in blocks",
            "z": "the scales of a column are in one vector",
        },
        local={"N": lambda local: local.size("n")},
    )


@rule("HyperConnectionPreMix", domain=DOMAIN)
def pre_mix(node: gs.Node) -> Rule:
    """Sharding rule of HyperConnectionPreMix: `d0 c h, d0 c -> d0 h {sum: c}`: the sum of c
    branches of h features, weighted by gates."""
    x, gates = node.inputs
    rank = _rank(node.outputs[0])
    sizes = _branches(node, x, rank)
    if sizes is None:
        return whole_rule(node, "its branches are not known")
    lead = dims_text(names("d", rank - 1))
    streams = f"{lead} c h" if _rank(x) > rank else f"{lead} (c h)"
    text = f"{streams}, {lead} {_gates(gates, rank, sizes)} -> {lead} h"
    linear = (frozenset({0}), frozenset({1}))
    return einsum(node, text, sizes=sizes, linear=linear, local=_own_branches(node))


@rule("HyperConnectionPostMix", domain=DOMAIN)
def post_mix(node: gs.Node) -> Rule:
    """Sharding rule of HyperConnectionPostMix: `d0 c h, d0 h, d0 c -> d0 c h`: adds a block's
    result to each of c branches, weighted by gates. If the node has a matrix that mixes the
    branches, c stays whole."""
    x, block, gates = node.inputs[:3]
    rank = _rank(block)
    sizes = _branches(node, x, rank)
    if sizes is None:
        return whole_rule(node, "its branches are not known")
    lead = dims_text(names("d", rank - 1))
    streams = f"{lead} c h" if _rank(x) > rank else f"{lead} (c h)"
    operands = [streams, f"{lead} h", f"{lead} {_gates(gates, rank, sizes)}"]
    whole = {}
    if given(node, 3) is not None:
        operands.append(f"{lead} x y")
        whole = dict.fromkeys("cxy", "a matrix mixes the branches")
    text = f"{', '.join(operands)} -> {streams}"
    return einsum(node, text, sizes=sizes, whole=whole, local=_own_branches(node))


def _branches(node: gs.Node, x: gs.Tensor, rank: int) -> dict[str, int] | None:
    """Returns the sizes of c, the branches, and of h, the features of each; None if they are
    unknown. `rank` is the number of dimensions of a tensor without branches."""
    shape = tensor_shape(x) or ()
    if len(shape) == rank + 1 and None not in shape[-2:]:
        return {"c": int(shape[-2] or 0), "h": int(shape[-1] or 0)}
    count = int(node.attrs.get("num_branches", 0))
    if len(shape) != rank or not count or shape[-1] is None:
        return None
    return {"c": count, "h": shape[-1] // count}


def _own_branches(node: gs.Node) -> dict[str | int, Callable[[Local], Any]]:
    """The attribute `num_branches` of the rank's node, by the size of the rank's shard; empty if
    the node does not have the attribute."""
    return {"num_branches": lambda local: local.size("c")} if "num_branches" in node.attrs else {}


def _gates(gates: gs.Tensor, rank: int, sizes: dict[str, int]) -> str:
    """Returns the last dimensions of the operand `gates` as text of a rule: a gate for each branch
    ("c"), or for each branch and feature.

    rank   the number of dimensions of a tensor without branches
    sizes  the sizes of c and h, from `_branches`
    """
    shape = tensor_shape(gates) or ()
    if len(shape) == rank + 1:
        return "c 1" if shape[-1] == 1 else "c h"
    return "c" if shape[-1] == sizes["c"] else "(c h)"


@rule("MRotaryEmbedding", domain=DOMAIN)
def multimodal_rotary(node: gs.Node) -> Rule:
    """Sharding rule of MRotaryEmbedding: `b s h, z b s, _, _ -> b s h`; `b n s h` if heads are a
    dimension, which may be split. z are the three positions of a token; z and h stay whole."""
    if node.attrs.get("is_packed_batching"):
        return whole_rule(node, "sequences follow each other in one row")
    x = "b n s h" if _rank(node.inputs[0]) == 4 else "b s h"
    whole = {"h": ROWS, "z": "three positions of a token"}
    return einsum(node, f"{x}, z b s, _, _ -> {x}", whole=whole)


@rule("NGramHashMapping", domain=DOMAIN)
def ngram_hash(node: gs.Node) -> Rule:
    """Sharding rule of NGramHashMapping: `b s, _, _, b p -> b s o; b p`; only the batch may be
    split, because each window of tokens reaches back over s, and into the state p."""
    operands = given_specs(["b s", "_", "_", "b p", "_", "_", "b s"], node.inputs)
    results = given_specs(["b s o", "b p"], node.outputs)
    used = " ".join([*operands, *results]).split()
    reasons = {"s": "a window reaches back", "p": "a window reaches back", "o": ROWS}
    whole = {f: why for f, why in reasons.items() if f in used}
    return einsum(node, f"{', '.join(operands)} -> {'; '.join(results)}", whole=whole)
