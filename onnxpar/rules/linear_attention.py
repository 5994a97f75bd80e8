"""Linear attention and causal convolutions with a carried state: by batch, head and channel.

ONNX has both since opset 27; onnxruntime has them in com.microsoft, with more attributes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.ir.tensors import Size, dtype_of, given, tensor_shape
from onnxpar.rules.index_maps import IndexMap, tied_fields
from onnxpar.rules.movement import int64
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, given_specs, rule, whole_rule

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
    """`b c h, c 1 w, c, b c p -> b c s; b c p`. The positions s are co-sharded with those of the
    operand, h: a rank fetches the p positions before its shard, and all ranks fetch the last p for
    the new state."""
    plain = {"activation", "ndim"}
    odd = [k for k, v in node.attrs.items() if k not in plain and v and not k.startswith("onnxpar")]
    if odd or node.attrs.get("ndim", 1) != 1 or len(node.outputs) > 2:
        return whole_rule(node, "its channels or states are in another order")
    operands = given_specs(["b c h", "c 1 w", "c", "b c p"], node.inputs)
    results = given_specs(["b c s", "b c p"], node.outputs)
    used = " ".join([*operands, *results]).split()
    whole = {"w": "the weights of one window", "p": "positions before the first"}
    length = (tensor_shape(node.inputs[0]) or (None,) * 3)[2]
    back = ((tensor_shape(node.inputs[1]) or (None,) * 3)[2] or 1) - 1
    fields: dict[str, Any] = {}
    if length:
        positions = IndexMap("h", "s", np.arange(length))
        fields = {**tied_fields({2: positions}), "lower": partial(_lower, back=back, length=length)}
    else:
        whole |= dict.fromkeys("hs", "a data-dependent size")
    is_linear = str(node.attrs.get("activation", "none")) in ("none", "b'none'")
    group = frozenset(i for i in (0, 3) if given(node, i) is not None)
    return einsum(
        node,
        f"{', '.join(operands)} -> {'; '.join(results)}",
        sizes={"h": length, "s": length},
        whole={f: why for f, why in whole.items() if f in used},
        linear=(group,) if is_linear and given(node, 2) is None else (),
        **fields,
    )


def _lower(build: Lowering, back: int, length: int) -> None:
    """Gives the kernel the `back` positions before the rank's shard as its past state."""
    node, x = build.local.node, build.input(0)

    def stretch(local: Local) -> tuple[int, int]:
        start, end = local.interval("s")
        return max(start - back, 0), end

    def before(local: Local) -> int:
        return local.interval("s")[0] - stretch(local)[0]

    held = build.fetch(x, "h", 2, stretch)
    cut = build.per_rank(lambda local: int64([before(local)]))
    own = _part(build, held, cut, int64([length]))
    past = _past(build, x, back)
    if back:
        first = build.per_rank(lambda local: int64([min(local.interval("s")[0], back)]))
        older = _part(build, past, first, int64([back]))
        past = build.add("Concat", [older, _part(build, held, int64([0]), cut)], axis=2)
    bias = build.input(2) if given(node, 2) is not None else gs.Variable.empty()
    types = [(dtype_of(t), build.local.output_shape(i)) for i, t in enumerate(node.outputs)]
    operands = [own, build.input(1), bias, past]
    made = build.make_each(node.op, operands, types, domain=node.domain, **node.attrs)
    build.finish("Identity", [made[0]])
    if len(made) > 1 and node.outputs[1].name:
        last = build.fetch(x, "h", 2, lambda local: (max(length - back, 0), length))
        older = _part(build, _past(build, x, back), int64([min(length, back)]), int64([back]))
        build.finish("Concat", [older, last], 1, axis=2)


def _part(build: Lowering, x: gs.Tensor, start: Any, end: Any) -> gs.Tensor:
    return build.add("Slice", [x, start, end, int64([2])])


def _past(build: Lowering, x: gs.Tensor, back: int) -> gs.Tensor:
    """The past state, or zeros if there is none."""
    if given(build.local.node, 3) is not None:
        return build.input(3)
    lead = build.add("Slice", [build.add("Shape", [x]), int64([0]), int64([2])])
    shape = build.add("Concat", [lead, int64([back])], axis=0)
    zero = np.zeros((1, 1, 1), dtype_of(x))
    return build.make("Expand", [zero, shape], (dtype_of(x), [*build.shape(x)[:2], back]))


for _domain in ("", "com.microsoft"):
    rule("LinearAttention", domain=_domain)(linear_attention)
    rule("CausalConvWithState", domain=_domain)(causal_convolution)
