"""onnxruntime's MultiHeadAttention, replaced by nodes of ONNX ops: where its keys are split, or, in
causal attention, its queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import given, tensor_shape
from onnxpar.rules.attention_lowering import least_of
from onnxpar.rules.communicate import finish, has_output, held_positions, like, widen
from onnxpar.rules.movement import int64
from onnxpar.rules.rule import Lowering

_BIAS, _MASK, _ADDED = 3, 4, 5
"""Indices of operands."""


@dataclass(frozen=True)
class HeadsLowering:
    """Replaces a MultiHeadAttention without a cache whose keys, or in causal attention also
    queries, are split.

    scale      factor of the scores
    filter     number that is added to the scores of masked keys
    is_causal  True if a query sees no later keys; as in onnxruntime's kernel, the last query sees
               all keys, even if there are more keys than queries
    queries    the global number of queries
    """

    scale: float
    filter: float
    is_causal: bool
    queries: int

    def lower(self, build: Lowering) -> None:
        """Attends to the rank's keys, and combines the results of all ranks by all-reduces of the
        largest score and of the sums."""
        query, key, value = self._heads(build)
        scores = self._scores(build, query, key)
        largest = build.add("ReduceMax", [scores], axes=[3], keepdims=1)
        shifted = build.add("Sub", [scores, build.all_reduce(largest, ["t"], "max")])
        powers = build.add("Exp", [shifted])
        part = build.add("ReduceSum", [powers], axes=[3], keepdims=1)
        both = build.add("Concat", [build.add("MatMul", [powers, value]), part], axis=3)
        both = build.all_reduce(both, ["t"])
        last, limit, axis = int64([-1]), int64([np.iinfo(np.int64).max]), int64([3])
        total = build.add("Slice", [both, last, limit, axis])
        result = build.add("Div", [build.add("Slice", [both, int64([0]), last, axis]), total])
        result = build.add("Transpose", [result], perm=[0, 2, 1, 3])
        shape = build.per_rank(lambda local: int64([0, 0, local.size("n") * local.size("e")]))
        finish(build, "Reshape", [result, shape])
        for i, x in ((1, key), (2, value)):
            if has_output(build, i):
                finish(build, "Identity", [x], i)

    def _heads(self, build: Lowering) -> list[gs.Tensor]:
        """Returns the queries, keys and values, with their biases added, each as (batch, heads,
        sequence, width)."""
        node = build.local.node
        parts = [widen(build, build.input(i)) for i in range(3)]
        if given(node, _BIAS) is not None:
            biases = build.add_each(
                "Split",
                [widen(build, build.input(_BIAS))],
                3,
                axis=0,
                split=lambda local: [local.size("n") * local.size(f) for f in "dde"],
            )
            parts = [build.add("Add", pair) for pair in zip(parts, biases, strict=True)]
        return [
            self._apart(build, x, f) if len(tensor_shape(node.inputs[i]) or ()) == 3 else x
            for i, (x, f) in enumerate(zip(parts, "dde", strict=True))
        ]

    def _apart(self, build: Lowering, x: gs.Tensor, width: str) -> gs.Tensor:
        """Turns (batch, sequence, heads x width) into (batch, heads, sequence, width); `width` is
        the factor of the width."""
        shape = build.per_rank(lambda local: int64([0, 0, local.size("n"), local.size(width)]))
        return build.add("Transpose", [build.add("Reshape", [x, shape])], perm=[0, 2, 1, 3])

    def _scores(self, build: Lowering, query: gs.Tensor, key: gs.Tensor) -> gs.Tensor:
        """Returns the scores of the rank's keys with biases and masks, (batch, heads, queries,
        keys)."""
        node = build.local.node
        query = build.add("Mul", [query, like(query, self.scale)])
        key = build.add("Transpose", [key], perm=[0, 1, 3, 2])
        scores = build.add("MatMul", [query, key])
        if given(node, _ADDED) is not None:
            scores = build.add("Add", [scores, widen(build, build.input(_ADDED))])
        if given(node, _MASK) is not None:
            shown = self._shown(build)
            hidden = build.add("Where", [shown, like(scores, 0), like(scores, self.filter)])
            scores = build.add("Add", [scores, hidden])
        if self.is_causal:
            rows, columns = held_positions(build, "s", 0, 2), held_positions(build, "t")
            last = build.per_rank(lambda _: np.array(self.queries - 1))
            sees = build.add("Not", [build.add("Less", [rows, columns])])
            sees = build.add("Or", [sees, build.add("Equal", [rows, last])])
            least = like(scores, least_of(node.inputs[0]))
            scores = build.add("Where", [sees, scores, least])
        return scores

    def _shown(self, build: Lowering) -> gs.Tensor:
        """Returns a boolean mask of the keys that the mask operand shows, which broadcasts to the
        scores. The operand holds the number of keys of each sample, or a nonzero number for each
        key to show."""
        mask = build.input(_MASK)
        rank = len(tensor_shape(build.local.node.inputs[_MASK]) or ())
        zero = like(mask, 0)
        if rank == 1:
            lengths = build.add("Cast", [build.add("Unsqueeze", [mask], axes=[1, 2, 3])], to=7)
            return build.add("Less", [held_positions(build, "t"), lengths])
        mask = build.add("Unsqueeze", [mask], axes=[1, 2] if rank == 2 else [1])
        return build.add("Not", [build.add("Equal", [mask, zero])])


def split_keys(node: gs.Node, width: int) -> dict[str, Any]:
    """Returns the fields of a MultiHeadAttention's rule with which its keys t may be split; an
    empty dict if the node has a cache, returns scores, or has a mask or bias without a lowering.
    `width` is the width of a query head."""
    mask = tensor_shape(node.inputs[_MASK]) if given(node, _MASK) is not None else ()
    packed = len(tensor_shape(node.inputs[1]) or ()) != 3 and given(node, _BIAS) is not None
    if any(given(node, i) is not None for i in (6, 7)) or len(mask or ()) == 4 or packed:
        return {}
    if len(node.outputs) > 3 and node.outputs[3].name:
        return {}
    is_causal = bool(node.attrs.get("unidirectional"))
    scale = node.attrs.get("scale") or 1 / np.sqrt(width)
    hidden = node.attrs.get("mask_filter_value", -10000.0)
    queries = (tensor_shape(node.inputs[0]) or (0, 0))[1] or 0
    lowering = HeadsLowering(scale, hidden, is_causal, queries)
    return {
        "communicating": frozenset("t"),
        "lowered": frozenset("st") if is_causal else frozenset("t"),
        "lower": lowering.lower,
    }
