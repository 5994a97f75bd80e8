"""GroupQueryAttention over caches of fixed length that are split along positions.

Each rank holds the keys and values of some positions. A rank writes the new tokens at its positions
and attends to its positions; ranks combine the results by the largest score and the sum of
exponentials of each query (log-sum-exp).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, given, tensor_shape
from onnxpar.rules.attention import attention_products
from onnxpar.rules.attention_lowering import default_scale, least_of
from onnxpar.rules.communicate import finish, held_positions, like, widen
from onnxpar.rules.contrib_attention import DOMAIN as CONTRIB
from onnxpar.rules.fused_attention import DOMAIN
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, given_specs, rule

CACHED = "CachedAttention"
PAST, LENGTHS, TOTAL, COSINE = 3, 5, 6, 7
"""Indices of operands."""
_ATTRIBUTES = frozenset(("num_heads", "kv_num_heads", "do_rotary", "scale", "softcap"))
_DEFAULTS = {
    "local_window_size": -1,
    "rotary_interleaved": 0,
    "smooth_softmax": 0,
    "sliding_window_cache": 0,
    "qk_output": 0,
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
}
"""Further attributes, with the only values that are supported."""
_ZERO, _ONE = np.array(0, np.int64), np.array(1, np.int64)
_ROTATED = "its elements are rotated in pairs"


@rule(CACHED, domain=DOMAIN)
def cached_attention(node: gs.Node) -> Rule:
    """Sharding rule of CachedAttention: `b s (k g d), b s (k d), b s (k d), b k p d, b k p d, b, ()
    -> b s (k g d); b k p d; ...`. This is com.microsoft's GroupQueryAttention with caches of one
    length before and after a run, so that their positions p may be split. k are the heads of keys,
    g the query heads that share one, s the new tokens. Keys and values may be packed into the
    query."""
    heads, shared = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    cache = tensor_shape(node.inputs[PAST]) or ()
    packed = given(node, 1) is None
    sizes: dict[str, Size] = {"k": shared, "g": heads // shared, "d": cache[3], "e": cache[3]}
    lengths = "b 1" if len(tensor_shape(node.inputs[LENGTHS]) or ()) == 2 else "b"
    operands = ["b s (k g d) + (k d) + (k d)" if packed else "b s (k g d)"]
    operands += ["b s (k d)", "b s (k d)", "b k p d", "b k p d", lengths]
    total = tensor_shape(node.inputs[TOTAL]) or ()
    operands += ["1" if len(total) else "()", "m r", "m r"]
    operands = given_specs(operands[: len(node.inputs)], node.inputs)
    whole = {"s": "each token has a position of its own", "d": _ROTATED}
    if given(node, COSINE) is not None:
        whole |= {"m": "it is looked up by position", "r": _ROTATED}

    def products(local: Any) -> int:
        return attention_products({**local, "e": local["d"]}, "p")

    return einsum(
        node,
        f"{', '.join(operands)} -> b s (k g d); b k p d; b k p d",
        sizes=sizes,
        whole=whole,
        reduce={},
        communicating=frozenset("p"),
        lowered=frozenset("p"),
        lower=lambda build: _Lowering(build, heads // shared).lower(),
        products=products,
        has_kernel=False,
    )


def can_split_cache(node: gs.Node, states: Collection[tuple[str, str]]) -> bool:
    """True for a GroupQueryAttention that the op CachedAttention can replace: it has only supported
    attributes, its caches are among `states`, (input, output) names, and the model declares one
    fixed length of a cache before and after a run."""
    if node.op != "GroupQueryAttention" or node.domain != CONTRIB:
        return False
    others = {k: v for k, v in node.attrs.items() if k not in _ATTRIBUTES}
    if any(others[key] != default for key, default in _DEFAULTS.items() if key in others):
        return False
    if others.keys() - _DEFAULTS.keys() or any(t.name for t in node.inputs[COSINE + 2 :]):
        return False
    if not all(given(node, i) for i in (0, PAST, PAST + 1, LENGTHS, TOTAL)):
        return False
    if len(node.outputs) < 3 or any(t.name for t in node.outputs[3:]):
        return False
    pairs = [(node.inputs[PAST + i], node.outputs[1 + i]) for i in (0, 1)]
    for before, after in pairs:
        shape = tensor_shape(before) or ()
        is_state = (before.name, after.name) in states and len(shape) == 4
        if not is_state or None in shape[1:] or shape[2] != _declared_length(after):
            return False
    return True


def _declared_length(tensor: gs.Tensor) -> int | None:
    """Returns dimension 2 of a graph output, the length of a cache (batch, heads, length, width),
    as the model declares it; None if it is open or undeclared."""
    type_ = vars(tensor).get("onnx_declared")
    dims = list(type_.tensor_type.shape.dim) if type_ is not None else []
    return dims[2].dim_value or None if len(dims) == 4 else None


class _Lowering:
    """Builds the nodes that a rank runs in place of one CachedAttention whose cache is split by
    position. `group` is the number of query heads that share a key head."""

    def __init__(self, build: Lowering, group: int) -> None:
        self.build = build
        node = build.local.node
        self.attrs = dict(node.attrs)
        length, width = (tensor_shape(node.inputs[PAST]) or (0, 0))[-2:]
        self.length, self.width = length or 0, width or 0
        self.least = least_of(node.inputs[0])
        self.rotates = given(node, COSINE) is not None and bool(self.attrs.get("do_rotary"))
        self.packed = given(node, 1) is None

    def lower(self) -> None:
        """Writes the new tokens into the rank's shard of the caches, attends to it, and combines
        the results of all ranks."""
        build = self.build
        query, key, value = self._heads()
        count = build.add("Gather", [build.add("Shape", [query]), np.array(2, np.int64)])
        lengths = self._lengths()
        past = build.add("Max", [build.add("Sub", [lengths, count]), _ZERO])
        rows = build.add("Add", [held_positions(build, "s"), past])  # batch, queries
        if self.rotates:
            query, key = self._rotated(query, rows), self._rotated(key, rows)
        columns = held_positions(build, "p")
        rows = build.add("Unsqueeze", [rows], axes=[1, 3])  # batch, 1, queries, 1
        keys = self._written(PAST, key, rows, columns)
        values = self._written(PAST + 1, value, rows, columns)
        build.finish("Identity", [keys], 1)
        build.finish("Identity", [values], 2)
        lengths = build.add("Unsqueeze", [lengths], axes=[2, 3])
        self._attend(query, keys, values, self._seen(rows, columns, lengths))

    def _seen(self, rows: gs.Tensor, columns: gs.Tensor, lengths: gs.Tensor) -> gs.Tensor:
        """Returns a boolean mask (batch, 1, queries, positions) of the positions in the cache that
        each query sees: up to its own, and within the sample.

        rows     the position of each query
        columns  the positions in the rank's shard of the cache
        lengths  the number of tokens of each sample
        """
        build = self.build
        seen = build.add("LessOrEqual", [columns, rows])
        return build.add("And", [seen, build.add("Less", [columns, lengths])])

    def _heads(self) -> list[gs.Tensor]:
        """Returns queries, keys and values of the new tokens, each as (batch, heads, new tokens,
        width)."""
        build, width = self.build, self.width

        def heads(local: Local, role: int) -> int:
            return local.size("k") * (1 if role else local.size("g"))

        parts = [build.input(i) for i in range(3)]
        if self.packed:
            parts = [
                *build.add_each(
                    "Split",
                    [build.input(0)],
                    3,
                    axis=2,
                    split=lambda local: [heads(local, i) * width for i in range(3)],
                )
            ]
        heads_of: list[gs.Tensor] = []
        for i, part in enumerate(parts):

            def shape(local: Local, role: int = i) -> Any:
                return np.array([0, 0, heads(local, role), width], np.int64)

            part = build.add("Reshape", [part, build.per_rank(shape)])
            heads_of.append(build.add("Transpose", [part], perm=[0, 2, 1, 3]))
        return heads_of

    def _lengths(self) -> gs.Tensor:
        """Returns the number of tokens of each sample with the new ones, (batch, 1) int64. If a
        sample has more than the cache has places, a Gather with an index out of range makes the run
        fail."""
        build = self.build
        lengths = build.add("Reshape", [build.input(LENGTHS), np.array([-1, 1], np.int64)])
        lengths = build.add("Add", [build.add("Cast", [lengths], to=onnx.TensorProto.INT64), _ONE])
        is_late = build.add("Greater", [lengths, np.array(self.length, np.int64)])
        at = build.add("Cast", [is_late], to=onnx.TensorProto.INT64)  # 1 is out of range
        return build.add("Add", [lengths, build.add("Gather", [_ZERO.reshape(1), at])])

    def _rotated(self, x: gs.Tensor, rows: gs.Tensor) -> gs.Tensor:
        """Returns queries or keys `x` after rotary embedding at the positions `rows`, by the tables
        of cosines and sines that are operands of the node."""
        build = self.build
        cosine, sine = (
            build.add("Unsqueeze", [build.add("Gather", [build.input(i), rows], axis=0)], axes=[1])
            for i in (COSINE, COSINE + 1)
        )
        half = build.shape(build.input(COSINE))[1]
        sizes = [half, half, *([self.width - 2 * half] if 2 * half < self.width else [])]
        a, b, *rest = build.add_each("Split", [x], len(sizes), axis=3, split=sizes)
        turned = [
            build.add("Sub", [build.add("Mul", [a, cosine]), build.add("Mul", [b, sine])]),
            build.add("Add", [build.add("Mul", [b, cosine]), build.add("Mul", [a, sine])]),
        ]
        return build.add("Concat", [*turned, *rest], axis=3)

    def _written(
        self, operand: int, new: gs.Tensor, rows: gs.Tensor, columns: gs.Tensor
    ) -> gs.Tensor:
        """Returns the rank's shard of a cache with the new tokens written at their positions. A
        MatMul with a 0/1 matrix (positions x new tokens) does that; each row has at most one 1.

        operand  the index of the cache among the node's operands
        new      the new tokens' keys or values
        rows     the positions of the new tokens
        columns  the positions in the rank's shard
        """
        build = self.build
        is_place = build.add("Equal", [rows, columns])  # batch, 1, queries, positions
        chosen = build.add("Cast", [is_place], to=onnx.helper.np_dtype_to_tensor_dtype(new.dtype))
        chosen = build.add("Transpose", [chosen], perm=[0, 1, 3, 2])
        placed = build.add("MatMul", [chosen, new])
        is_new = build.add("ReduceMax", [chosen], axes=[3], keepdims=1)
        is_new = build.add("Greater", [is_new, like(new, 0)])
        return build.add("Where", [is_new, placed, build.input(operand)])

    def _attend(
        self, query: gs.Tensor, keys: gs.Tensor, values: gs.Tensor, seen: gs.Tensor
    ) -> None:
        """Attends to the rank's shard of the caches, combines the results of all ranks, and makes
        that result 0 of the node. `seen` is a boolean mask of the keys that each query sees."""
        build = self.build
        scale = self.attrs.get("scale") or default_scale(self.width)
        query = widen(build, query)
        query = build.add("Mul", [query, like(query, scale)])
        keys = build.add("Transpose", [widen(build, keys)], perm=[0, 1, 3, 2])
        scores = self._by_head(build.add("MatMul", [self._grouped(query), keys]))
        cap = self.attrs.get("softcap", 0.0)
        if cap:
            bent = build.add("Tanh", [build.add("Div", [scores, like(scores, cap)])])
            scores = build.add("Mul", [bent, like(scores, cap)])
        least = like(scores, self.least)
        scores = build.add("Where", [seen, scores, least])
        largest = build.add("ReduceMax", [scores], axes=[3], keepdims=1)
        largest = build.all_reduce(build.add("Max", [largest, least]), ["p"], "max")
        powers = build.add("Exp", [build.add("Sub", [scores, largest])])
        powers = build.add("Where", [seen, powers, like(scores, 0)])
        total = build.add("ReduceSum", [powers], axes=[3], keepdims=1)
        mean = build.add("MatMul", [self._grouped(powers), widen(build, values)])
        both = build.add("Concat", [self._by_head(mean), total], axis=3)
        both = build.all_reduce(both, ["p"])
        mean, total = build.add_each("Split", [both], 2, axis=3, split=[self.width, 1])
        result = build.add("Transpose", [build.add("Div", [mean, total])], perm=[0, 2, 1, 3])

        def shape(local: Local) -> Any:
            heads = local.size("k") * local.size("g")
            return np.array([0, 0, heads * local.size("d")], np.int64)

        finish(build, "Reshape", [result, build.per_rank(shape)])

    def _grouped(self, x: gs.Tensor) -> gs.Tensor:
        """Reshapes [b, heads, s, d] to [b, key heads, group * s, d]: the query heads that share a
        key head become more rows of it."""

        def shape(local: Local) -> Any:
            rows = local.size("g") * local.size("s")
            return np.array([0, local.size("k"), rows, 0], np.int64)

        return self.build.add("Reshape", [x, self.build.per_rank(shape)])

    def _by_head(self, x: gs.Tensor) -> gs.Tensor:
        """The inverse of `_grouped`: [b, key heads, group * s, d] to [b, heads, s, d]."""

        def shape(local: Local) -> Any:
            heads = local.size("k") * local.size("g")
            return np.array([0, heads, local.size("s"), 0], np.int64)

        return self.build.add("Reshape", [x, self.build.per_rank(shape)])
