"""Linear attention and causal convolutions with a carried state: by batch, head and channel.

ONNX has both since opset 27; onnxruntime has them in com.microsoft, with more attributes.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.ir.tensors import Size, given, tensor_shape
from onnxpar.rules.rule import Local, Rule, einsum, given_specs, rule, whole_rule

STEPS = "every step needs all earlier steps"


def linear_attention(node: gs.Node) -> Rule:
    """`b s (k g d), b s (k d), b s (k e), b k d e, b s (k d), b s k -> b s (k g e); b k d e`. The
    columns e of a state do not meet, so they may be split, too."""
    heads, groups = int(node.attrs["kv_num_heads"]), int(node.attrs["q_num_heads"])
    if node.attrs.get("state_window"):
        return whole_rule(node, "it keeps the states of several steps")
    if groups % heads:
        return whole_rule(node, "its query heads do not share key heads evenly")
    sizes = {"k": heads, "g": groups // heads}
    specs = ["b s (k g d)", "b s (k d)", "b s (k e)", "b k d e", "b s (k d)", "b s k"]
    if _width(node, 4) == heads:
        specs[4] = "b s k"
    if _width(node, 5) == 1:
        specs[5] = "b s 1"
    for at, name in ((1, "d"), (2, "e")):
        width = _width(node, at)
        if width is None or width % heads:
            return whole_rule(node, "the width of its heads is unknown")
        sizes[name] = width // heads
    operands = given_specs(specs, node.inputs)
    results = given_specs(["b s (k g e)", "b k d e"], node.outputs)

    def query_heads(local: Local) -> int:
        return local.size("k") * local.size("g")

    return einsum(
        node,
        f"{', '.join(operands)} -> {'; '.join(results)}",
        sizes=sizes,
        whole={"s": STEPS, "d": "each output is a sum over all of it"},
        linear=(frozenset({2, 3} if given(node, 3) is not None else {2}),),
        local={"q_num_heads": query_heads, "kv_num_heads": lambda local: local.size("k")},
    )


def _width(node: gs.Node, index: int) -> Size:
    """The last size of an operand; None if it is unknown or the operand is left out."""
    tensor = given(node, index)
    return None if tensor is None else (tensor_shape(tensor) or (None,))[-1]


def causal_convolution(node: gs.Node) -> Rule:
    """`b c s, c 1 w, c, b c p -> b c s; b c p`."""
    plain = {"activation", "ndim"}
    odd = [k for k, v in node.attrs.items() if k not in plain and v and not k.startswith("onnxpar")]
    if odd or node.attrs.get("ndim", 1) != 1 or len(node.outputs) > 2:
        return whole_rule(node, "its channels or states are in another order")
    operands = given_specs(["b c s", "c 1 w", "c", "b c p"], node.inputs)
    results = given_specs(["b c s", "b c p"], node.outputs)
    used = " ".join([*operands, *results]).split()
    whole = {"s": STEPS, "w": "the weights of one window", "p": "positions before the first"}
    is_linear = str(node.attrs.get("activation", "none")) in ("none", "b'none'")
    group = frozenset(i for i in (0, 3) if given(node, i) is not None)
    return einsum(
        node,
        f"{', '.join(operands)} -> {'; '.join(results)}",
        whole={f: why for f, why in whole.items() if f in used},
        linear=(group,) if is_linear and given(node, 2) is None else (),
    )


for _domain in ("", "com.microsoft"):
    rule("LinearAttention", domain=_domain)(linear_attention)
    rule("CausalConvWithState", domain=_domain)(causal_convolution)
