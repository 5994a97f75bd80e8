"""Attention in primitive ops, for shards of the query and of the key sequence.

If keys are split, each rank attends to its own keys. To combine the results, ranks exchange the
largest score and the sum of exponentials of each row (log-sum-exp), but no other scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import dtype_of, given
from onnxpar.rules.communicate import finish, has_output, held_positions, like, widen
from onnxpar.rules.rule import Local, Lowering

MASK, LENGTHS = 3, 6
"""Indices of operands."""
WINDOW = ("left_window_size", "right_window_size")
Width = Callable[[Local], int]


def _keys(local: Local) -> int:
    """The number of keys in the rank's shard, as a last dimension for `_by_group` and `_by_row`."""
    return local.size("t")


def _one(local: Local) -> int:
    """The size 1, as a last dimension for `_by_group` and `_by_row`."""
    return 1


_FAR = 2**62
"""A position behind all keys."""


@dataclass(frozen=True)
class AttentionLowering:
    """Replaces an Attention node whose queries or keys are split by nodes that each rank can run.

    flat     True if heads and width are one dimension: (batch, sequence, hidden)
    queries  the global number of queries
    past     the global length of the cache
    scale    the factor of the scores
    attrs    the attributes of the node

    As in onnxruntime, a masked score is the least number of its type, and the result is zero for a
    query that sees no key.
    """

    flat: bool
    queries: int
    past: int
    scale: float
    attrs: dict[str, Any]

    def lower(self, build: Lowering) -> None:
        """Adds the nodes that a rank runs in place of the Attention, if queries, keys or both are
        split."""
        if build.local.is_split("t"):
            self._attend_to_parts(build)
        else:
            self._attend_under_mask(build)

    def _attend_under_mask(self, build: Lowering) -> None:
        """Called if only queries are split: keeps the op, with an explicit mask in place of its
        causal and window attributes."""
        node = build.local.node
        mask, visible = self._mask(build), self._visible(build)
        if mask is not None:
            visible = build.add("Where", [visible, mask, like(mask, -np.inf)])
        operands = [build.input(i) for i in range(len(node.inputs))]
        operands += [gs.Variable.empty()] * (MASK + 1 - len(operands))
        operands[MASK] = visible
        attrs = {k: v for k, v in self.attrs.items() if k not in ("is_causal", *WINDOW)}
        if self.flat:
            attrs["q_num_heads"] = lambda local: local.size("k") * local.size("g")
            attrs["kv_num_heads"] = lambda local: local.size("k")
        build.finish_each("Attention", operands, **attrs)

    def _mask(self, build: Lowering) -> gs.Tensor | None:
        """Returns the mask operand if it has numbers to add to the scores; None if it is boolean,
        or if there is none."""
        mask = given(build.local.node, MASK)
        return None if mask is None or dtype_of(mask) == np.bool_ else build.input(MASK)

    def _visible(self, build: Lowering) -> gs.Tensor | None:
        """Returns a boolean mask, True for each key (last dimension) that a query may attend to
        under causality, windows, lengths and a boolean mask operand; None if every query sees all
        keys."""
        node = build.local.node
        by_place = sees_by_place(self.attrs)
        rows = held_positions(build, "s", 0, 2) if by_place else None
        has_lengths = given(node, LENGTHS) is not None
        columns = self._columns(build) if by_place or has_lengths else None
        is_mask = given(node, MASK) is not None and self._mask(build) is None
        return self.visible(build, rows, columns, build.input(MASK) if is_mask else None)

    def visible(
        self,
        build: Lowering,
        rows: gs.Tensor | None,
        columns: gs.Tensor | None,
        mask: gs.Tensor | None,
    ) -> gs.Tensor | None:
        """Returns a boolean mask (..., query, key), True for each key that the query sees; None if
        every query sees all keys.

        rows     global positions of the queries, as a column; None if positions do not matter
        columns  global positions of the keys; None if positions do not matter
        mask     a further condition: True for the keys to show
        """
        masks: list[gs.Tensor] = []
        lengths = None
        if columns is not None and given(build.local.node, LENGTHS) is not None:
            lengths = build.add("Unsqueeze", [build.input(LENGTHS)], axes=[1, 2, 3])
            masks.append(build.add("Less", [columns, lengths]))
        if columns is not None and rows is not None and sees_by_place(self.attrs):
            ahead: Any = np.array(self.past, np.int64)
            if lengths is not None:
                ahead = build.add("Sub", [lengths, np.array(self.queries, np.int64)])
            masks += self._near(build, columns, build.add("Add", [rows, ahead]))
        if mask is not None:
            masks.append(mask)
        while len(masks) > 1:
            masks[-2:] = [build.add("And", masks[-2:])]
        return masks[0] if masks else None

    def _near(self, build: Lowering, columns: gs.Tensor, rows: gs.Tensor) -> list[gs.Tensor]:
        """Returns the conditions of position that the node states, 0 to 3 boolean masks
        (query, key): the key is not later than the query (causal attention), and not outside the
        query's window on the left, on the right.

        columns  positions of the keys
        rows     positions of the queries among the keys, as a column
        """
        left, right = (self.attrs.get(key, -1) for key in WINDOW)
        masks = []
        if self.attrs.get("is_causal"):
            last = rows
            if self.past:  # onnxruntime shows all keys to a single query behind a cache
                is_single = build.add("Equal", [np.array([self.queries]), np.array([1])])
                is_behind = build.add("Greater", [np.array([self.past]), np.array([0])])
                is_all = build.add("And", [is_single, is_behind])
                last = build.add("Where", [is_all, np.array(_FAR), rows])
            masks.append(build.add("LessOrEqual", [columns, last]))
        if left >= 0:
            first = build.add("Sub", [rows, np.array(left, np.int64)])
            masks.append(build.add("GreaterOrEqual", [columns, first]))
        if right >= 0:
            last = build.add("Add", [rows, np.array(right, np.int64)])
            masks.append(build.add("LessOrEqual", [columns, last]))
        return masks

    def _columns(self, build: Lowering) -> gs.Tensor:
        """Returns the global positions of the keys for which the rank computes scores, as a vector;
        cached keys come first."""
        if not self.past:
            return held_positions(build, "t")
        end = build.per_rank(lambda local: np.array(self.past + local.size("t"), np.int64))
        return build.add("Range", [np.array(0, np.int64), end, np.array(1, np.int64)])

    def _attend_to_parts(self, build: Lowering) -> None:
        """Called if keys are split: attends to the rank's keys, and combines the results of all
        ranks by all-reduces of each row's largest score, and of its sums."""
        scores = self._scores(build)
        largest = build.add("ReduceMax", [scores], axes=[3], keepdims=1)
        largest = build.all_reduce(largest, ["t"], "max")
        least = like(scores, least_of(build.local.node.inputs[0]))
        powers = powers_of(build, scores, build.add("Max", [largest, least]), least)
        part = build.add("ReduceSum", [powers], axes=[3], keepdims=1)
        value = self.by_head(build, 2)
        product = build.add("MatMul", [self._by_group(build, powers, _keys), value])
        both = build.add("Concat", [product, self._by_group(build, part, _one)], axis=3)
        both = build.all_reduce(both, ["t"])
        ends = [np.array([v], np.int64) for v in (0, -1, np.iinfo(np.int64).max, 3)]
        total = build.add("Slice", [both, ends[1], ends[2], ends[3]])
        is_zero = build.add("Equal", [total, like(total, 0)])
        total = build.add("Where", [is_zero, like(total, 1), total])
        result = build.add("Div", [build.add("Slice", [both, ends[0], ends[1], ends[3]]), total])
        if has_output(build, 3) and self.attrs.get("qk_matmul_output_mode", 0) == 3:
            finish(build, "Div", [powers, self._by_row(build, total, _one)], 3)
        self._finish_result(build, result)
        for i in (1, 2):
            if has_output(build, i):
                build.finish("Identity", [self.cut_heads(build, i)], i)

    def _scores(self, build: Lowering) -> gs.Tensor:
        """Returns the scores of the rank's keys, (batch, heads, queries, keys), with the soft cap
        and masks. Finishes result 3 of the node (its scores at one of three stages), if it is
        wanted."""
        mode = self.attrs.get("qk_matmul_output_mode", 0) if has_output(build, 3) else None
        query = self._by_group(build, self.by_head(build, 0), lambda local: local.size("d"))
        query = build.add("Mul", [query, like(query, self.scale)])
        key = build.add("Transpose", [self.by_head(build, 1)], perm=[0, 1, 3, 2])
        scores = build.add("MatMul", [query, key])
        scores = self._by_row(build, scores, _keys)
        self._return_scores(build, scores, mode == 0)
        scores = self.capped(build, scores)
        self._return_scores(build, scores, mode == 1)
        mask, visible = self._mask(build), self._visible(build)
        if mask is not None:
            scores = masked(build, scores, mask)
        if visible is not None:
            least = least_of(build.local.node.inputs[0])
            scores = build.add("Where", [visible, scores, like(scores, hidden(build, least))])
        self._return_scores(build, scores, mode == 2)
        return scores

    def capped(self, build: Lowering, scores: gs.Tensor) -> gs.Tensor:
        """Returns the scores bent into (-softcap, softcap) by a Tanh; unchanged if the node has no
        `softcap`."""
        cap = self.attrs.get("softcap", 0.0)
        if not cap:
            return scores
        bent = build.add("Tanh", [build.add("Div", [scores, like(scores, cap)])])
        return build.add("Mul", [bent, like(scores, cap)])

    def _return_scores(self, build: Lowering, scores: gs.Tensor, is_wanted: bool) -> None:
        """Makes `scores` result 3 of the node, if `is_wanted`."""
        if is_wanted:
            finish(build, "Identity", [scores], 3)

    def cut_heads(self, build: Lowering, operand: int) -> gs.Tensor:
        """Returns operand 0, 1 or 2 (queries, keys or values) as (batch, heads, sequence, width);
        if the node's operands are (batch, sequence, hidden), by a Reshape and a Transpose."""
        return self._cut(build, operand, operand == 0, "e" if operand == 2 else "d")

    def cut_results(self, build: Lowering, operand: int) -> gs.Tensor:
        """Like `cut_heads`, for an operand that has the shape of the node's result, such as its
        gradient."""
        return self._cut(build, operand, True, "e")

    def _cut(self, build: Lowering, operand: int, is_query: bool, width: str) -> gs.Tensor:
        """Returns an operand as (batch, heads, sequence, width).

        is_query  True if the operand has query heads, False if it has the (fewer) heads of keys
        width     the factor of the width, "d" or "e"
        """
        x = build.input(operand)
        if not self.flat:
            return x

        def shape(local: Local) -> Any:
            shared = local.size("g") if is_query else 1
            return np.array([0, 0, local.size("k") * shared, local.size(width)], np.int64)

        return build.add(
            "Transpose", [build.add("Reshape", [x, build.per_rank(shape)])], perm=[0, 2, 1, 3]
        )

    def by_head(self, build: Lowering, operand: int) -> gs.Tensor:
        """The result of `cut_heads`, as float32 if the operand has 16-bit floats: scores are
        computed in 32 bits."""
        return widen(build, self.cut_heads(build, operand))

    def _by_group(self, build: Lowering, x: gs.Tensor, width: Width) -> gs.Tensor:
        """Reshapes (batch, query heads, rows, width) to (batch, key heads, group x rows, width):
        query heads that share a key head become more rows of it, so that one MatMul serves all of
        them. `width` is a function of the rank's view."""

        def shape(local: Local) -> Any:
            rows = local.size("g") * local.size("s")
            return np.array([0, local.size("k"), rows, width(local)], np.int64)

        return build.add("Reshape", [x, build.per_rank(shape)])

    def _by_row(self, build: Lowering, x: gs.Tensor, width: Width) -> gs.Tensor:
        """The inverse of `_by_group`: returns (batch, query heads, sequence, width)."""

        def shape(local: Local) -> Any:
            heads = local.size("k") * local.size("g")
            return np.array([0, heads, local.size("s"), width(local)], np.int64)

        return build.add("Reshape", [x, build.per_rank(shape)])

    def _finish_result(self, build: Lowering, x: gs.Tensor) -> None:
        """Makes `x`, in the shape of `_by_group`, result 0 of the node, in the shape of its
        operands."""
        result = self._by_row(build, x, lambda local: local.size("e"))
        finish(build, "Identity", [self.joined_heads(build, result, "kge")])

    def joined_heads(self, build: Lowering, x: gs.Tensor, factors: str) -> gs.Tensor:
        """Turns (batch, heads, sequence, width) back into the form of the node's operands:
        (batch, sequence, hidden) if `flat`, else unchanged. `factors` are the factors of heads and
        width, e.g. "kge"."""
        if not self.flat:
            return x

        def shape(local: Local) -> Any:
            return np.array([0, 0, math.prod(map(local.size, factors))], np.int64)

        turned = build.add("Transpose", [x], perm=[0, 2, 1, 3])
        return build.add("Reshape", [turned, build.per_rank(shape)])


_EVEN = 25
"""From this opset on, if a mask gives all keys of a query the least number, the query attends to
all keys evenly; before, it attends to no key in onnxruntime."""


def hidden(build: Lowering, least: float) -> float:
    """Returns the score of a key that a query must not see: minus infinity from opset 25 on;
    before, `least`, the least number of the scores' type."""
    return -np.inf if build.opset >= _EVEN else least


def masked(build: Lowering, scores: gs.Tensor, mask: gs.Tensor) -> gs.Tensor:
    """Returns float32 scores plus a mask operand of numbers. Before opset 25, where a 16-bit mask
    has the least float16, the result is that number, too, as in onnxruntime, which adds in 16
    bits."""
    added = build.add("Add", [scores, widen(build, mask)])
    if dtype_of(mask) != np.float16 or build.opset >= _EVEN:
        return added
    least = np.finfo(np.float16).min
    shown = build.add("Greater", [mask, like(mask, least)])
    return build.add("Where", [shown, added, like(scores, least)])


def powers_of(build: Lowering, scores: gs.Tensor, largest: gs.Tensor, least: Any) -> gs.Tensor:
    """Returns exp(scores - largest), the numerators of a softmax; before opset 25, zeros for a
    query that sees no key.

    largest  the largest score of each query
    least    the score of masked keys: a query whose largest score is `least` sees none
    """
    powers = build.add("Exp", [build.add("Sub", [scores, largest])])
    if build.opset >= _EVEN:
        return powers
    sees = build.add("Greater", [largest, least])
    return build.add("Where", [sees, powers, like(scores, 0)])


def sees_by_place(attrs: Mapping[str, Any]) -> bool:
    """True if a query sees only keys at certain positions relative to its own: causal attention, or
    a window. `attrs` are the attributes of an Attention."""
    return bool(attrs.get("is_causal")) or any(attrs.get(key, -1) >= 0 for key in WINDOW)


def default_scale(width: int) -> float:
    """The factor of the scores if the node has no `scale`: 1/sqrt(width), for keys of this
    width."""
    return 1 / math.sqrt(width)


def least_of(tensor: gs.Tensor) -> float:
    """The least finite number of a tensor's element type."""
    dtype = dtype_of(tensor)
    return float(np.finfo(np.float32 if str(dtype) == "bfloat16" else dtype).min)
