"""onnxruntime's own ops that compute rows, samples, heads or channels separately: recurrences with
a carried state, lookups in and products with packed weights, and routers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, dtype_of, given, tensor_shape
from onnxpar.rules.communicate import like
from onnxpar.rules.indexing import finish_held
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Lowering, Rule, einsum, given_specs, names, rule, whole_rule

DOMAIN = "com.microsoft"
_STEPS = "every step needs all earlier steps"
_PACKED = "its elements are packed in blocks"


def _shape(node: gs.Node, index: int) -> tuple[Size, ...]:
    """The shape of an operand; () without that operand."""
    tensor = given(node, index)
    return () if tensor is None else tensor_shape(tensor) or ()


def _stated(
    node: gs.Node, operands: list[str], results: list[str], whole: dict[str, str], **fields: Any
) -> Rule:
    """Returns the rule with these dimensions of operands and results, `_` for each that the node
    does not have. `whole` has factors that must not be split, with the reason."""
    left = given_specs(operands, node.inputs) + ["_"] * (len(node.inputs) - len(operands))
    right = given_specs(results, node.outputs)
    used = {c for text in left + right for c in text if c.isalpha()}
    reasons = {f: why for f, why in whole.items() if f in used}
    return einsum(
        node, f"{', '.join(left)} -> {'; '.join(right)}", whole=reasons, reduce={}, **fields
    )


@rule("GatedDeltaNet", domain=DOMAIN)
def gated_delta_net(node: gs.Node) -> Rule:
    """Sharding rule of GatedDeltaNet:
    `b s k d, b s k d, b s (k g) e, _, b s (k g), b s (k g), b (k g) e d` to
    `b s (k g) e ; b (k g) e d`; `(b s)` or t instead of `b s` if sequences follow each other in one
    row.

    s are the steps; g value heads share a key head k. With packed operands or recorded updates,
    only the batch b may be split.
    """
    query, key, state = (_shape(node, i) for i in (0, 1, 6))
    value = _shape(node, 2)
    is_flat = len(query) in (2, 3) and not (len(query) == 3 and not key)
    batch = state[0] if state else query[0]
    whole = {"s": _STEPS, "t": _STEPS, "d": "each update reads all of it", "u": "a row holds all"}
    if given(node, 3) is not None:
        tokens, whole["b"] = "t", "requests of any length follow each other"
    elif is_flat:
        tokens = "(b s)"
    else:
        tokens = "b s"
    sizes: dict[str, Size] = {"b": batch, "s": _steps(query, batch, tokens)}
    if not key or node.attrs.get("state_update_capacity") or None in (key[-2], value[-2]):
        whole |= dict.fromkeys("kgexyzn", "a row holds all heads")
        operands = [f"{tokens} x", f"{tokens} k d", f"{tokens} n e", "_"]
        operands += [f"{tokens} y" + " d" * _has_width(node, tokens), f"{tokens} y", "b n e d"]
        operands += ["_", "_", "b"]
        if key:
            operands[0] = f"{tokens} k d"
        return _stated(node, operands, [f"{tokens} n e", "b n e d", "b u"], whole, sizes=sizes)
    heads, of_values = int(key[-2] or 1), int(value[-2] or 1)
    sizes |= {"k": heads, "g": of_values // heads, "d": query[-1], "e": value[-1]}
    value_heads = "(k g)"
    bias = _shape(node, 8)
    wide = "(k g d)" if bias[:1] != (of_values,) else value_heads
    operands = [f"{tokens} k d", f"{tokens} k d", f"{tokens} {value_heads} e", "_"]
    operands += [
        f"{tokens} {value_heads}" + " d" * _has_width(node, tokens),
        f"{tokens} {value_heads}",
    ]
    operands += [
        f"b {value_heads} e d",
        value_heads,
        f"{value_heads} d" if len(bias) == 2 else wide,
    ]
    results = [f"{tokens} {value_heads} e", f"b {value_heads} e d"]
    return _stated(node, operands, results, whole, sizes=sizes)


def _steps(query: tuple[Size, ...], batch: Size, tokens: str) -> Size:
    """Returns the number of steps of each sample, from the shape of the query; None if it is
    unknown. `tokens` is the text of the leading dimensions, "b s" or "(b s)"."""
    if tokens == "b s":
        return query[1]
    return None if query[0] is None or not batch else query[0] // batch


def _has_width(node: gs.Node, tokens: str) -> bool:
    """True if operand 4, the decay, differs between elements of a head, so that it has a last
    dimension d. `tokens` is the text of its leading dimensions."""
    lead = 2 if tokens == "b s" else 1
    return len(_shape(node, 4)) > lead + 1


@rule("VarlenCausalConvWithState", domain=DOMAIN)
def packed_causal_convolution(node: gs.Node) -> Rule:
    """Sharding rule of VarlenCausalConvWithState:
    `t c, c 1 w, _, c, b c p, _ -> t c ; b c p ; b u c`: only channels c may be split."""
    operands = ["t c", "c 1 w", "_", "c", "b c p", "_"]
    row = "requests of any length follow each other"
    whole = {"t": row, "b": row, "w": "the weights of one window"}
    whole |= {"p": "positions before the first", "u": "positions before the first"}
    return _stated(node, operands, ["t c", "b c p", "b u c"], whole)


@rule("AttnLSTM", domain=DOMAIN)
def attending_recurrence(node: gs.Node) -> Rule:
    """Sharding rule of AttnLSTM: `s b i, _, _, _, _, d b h, d b h, _, _, _, _, b m x -> s d b h ; d
    b h ; d b h`: only the batch b may be split."""
    if given(node, 4) is not None or given(node, 12) is not None:
        return whole_rule(node, "a rank without samples would have one without steps")
    operands = ["s b i", "d v j", "d v h", "d y", "_", "d b h", "d b h", "d z"]
    operands += ["d q n", "d x n", "d n", "b m x"]
    inner = "every step of the recurrence needs all of it"
    whole = {"s": _STEPS, "d": "the directions share its attributes"}
    whole |= dict.fromkeys("ijhvyzqnmx", inner)
    return _stated(node, operands, ["s d b h", "d b h", "d b h"], whole)


@rule("MatMulFpQ4", domain=DOMAIN)
def packed_product(node: gs.Node) -> Rule:
    """Sharding rule of MatMulFpQ4: `m0 k, _, _ -> m0 n`: only rows of operand 0 may be split, as
    the weight is one block of bytes."""
    rows = dims_text(names("m", len(_shape(node, 0)) - 1))
    return _stated(node, [f"{rows} k", "_", "_"], [f"{rows} n"], dict.fromkeys("kn", _PACKED))


@rule("WordConvEmbedding", domain=DOMAIN)
def word_embedding(node: gs.Node) -> Rule:
    """Sharding rule of WordConvEmbedding: `b w, f 1 x c, f, v c -> b f`: b words of w characters, a
    convolution with f filters. Words and filters may be split."""
    if len(_shape(node, 0)) != 2:
        return whole_rule(node, "its words are not a list")
    one = "the characters of a word are one row"
    whole = {"w": one, "x": "the weights of one window", "c": one, "v": "it is looked up by index"}
    local = {"embedding_size": lambda at: at.size("f")} if "embedding_size" in node.attrs else {}
    return _stated(node, ["b w", "f 1 x c", "f", "v c"], ["b f"], whole, local=local)


@rule("MoEGroupRouter", domain=DOMAIN)
def group_router(node: gs.Node) -> Rule:
    """Sharding rule of MoEGroupRouter: `b0 e, e -> (b0) e`; tokens may be split, experts e may not.
    With a projection, `t w, e, e w -> t e`."""
    lead = names("b", len(_shape(node, 0)) - 1)
    whole = {"e": "experts are chosen by their scores", "w": "scores are bent after the sum"}
    if given(node, 2) is not None:
        return _stated(node, ["t w", "e", "e w"], ["t e"] * 3, whole)
    tokens = f"({' '.join(lead)})" if len(lead) > 1 else dims_text(lead)
    sizes = dict(zip(lead, _shape(node, 0), strict=False))
    return _stated(node, [f"{dims_text(lead)} e", "e"], [f"{tokens} e"] * 3, whole, sizes=sizes)


@rule("GatherPacked", domain=DOMAIN)
def packed_lookup(node: gs.Node) -> Rule:
    """Sharding rule of GatherPacked: `v w, i -> i k`: if rows v of the table are split, each rank
    looks up the rows in its shard, with zeros for other rows: a partial sum. As in the kernel, an
    index outside the table chooses row 0."""
    index = dims_text(names("i", len(_shape(node, 1))))
    rows = _shape(node, 0)[0]
    whole = dict.fromkeys("wk", _PACKED)

    def lower(build: Lowering) -> None:
        dtype = dtype_of(build.input(1))
        zero = like(build.input(1), 0)
        start, count, size = (
            build.per_rank(lambda local: np.array(local.interval("v")[0], dtype)),
            build.per_rank(lambda local: np.array(local.size("v"), dtype)),
            build.per_rank(lambda _: np.array(rows, dtype)),
        )
        exists = _between(build, build.input(1), size)
        local_index = build.add("Sub", [build.add("Where", [exists, build.input(1), zero]), start])
        held = _between(build, local_index, count)
        at = build.add("Where", [held, local_index, zero])
        table = build.filled(build.input(0), "v", 0)
        type_ = (dtype_of(node.outputs[0]), build.local.output_shape(0))
        looked_up = build.make(node.op, [table, at], type_, domain=DOMAIN, **node.attrs)
        finish_held(build, build.add("Unsqueeze", [held], axes=[-1]), looked_up)

    text = f"v w, {index} -> {index} k"
    fields: dict[str, Any] = {"reduce": {"v": "sum"}, "lowered": frozenset("v"), "lower": lower}
    return einsum(node, text, whole=whole, contiguous=frozenset("v"), **fields)


def _between(build: Lowering, x: gs.Tensor, end: gs.Tensor) -> gs.Tensor:
    """Returns a boolean mask: True for numbers in [0, end)."""
    above = build.add("Not", [build.add("Less", [x, like(x, 0)])])
    return build.add("And", [above, build.add("Less", [x, end])])
