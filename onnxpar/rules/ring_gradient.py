"""The gradient of Attention over shards of the queries; the shards of keys and values travel in a
ring.

Each rank keeps its queries, the gradient of their results, and three numbers for each query: the
largest score and the sum of exponentials from the forward pass, and the sum of the gradient times
the result. From these numbers, the rank recomputes the probabilities of a block (Dao et al.,
"FlashAttention", 2022). Gradients of keys and values travel with the keys and accumulate; after one
more step, they arrive at the owners of the keys.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.rules.attention_lowering import AttentionLowering
from onnxpar.rules.communicate import finish, has_output, like, widen
from onnxpar.rules.ring import Block, Ring, like_head
from onnxpar.rules.rule import Lowering

DY, Y, SUMMARY = 7, 8, 9
"""Indices of the operands behind Attention's own operands: the gradient of the result, the result,
and for each query the largest score and the sum of exponentials."""


class GradientRing(Ring):
    """Builds the nodes that a rank runs in place of the gradient of one Attention."""

    def __init__(self, op: AttentionLowering, build: Lowering) -> None:
        super().__init__(op, build)
        self.widths = [build.local.size("d"), build.local.size("e")]

    def lower(self) -> None:
        """Adds the gradients of one block after the other, and makes the gradients of queries, keys
        and values the results of the node."""
        build, op = self.build, self.op
        pair = build.add("Concat", [op.cut_heads(build, 1), op.cut_heads(build, 2)], axis=3)
        rows = self._rows()
        if self.places():
            rows, pair = self.placed(rows, "s"), self.placed(pair, "t")
        travels = {"pair": pair}
        of_query: gs.Tensor | None = None
        for block in self.blocks(travels):
            mine, theirs = self._gradients(block, rows, travels["pair"])
            if of_query is None:
                of_query, travels["sums"] = mine, theirs
                continue
            old, sums = block.cut_rows(of_query), block.cut_columns(travels["sums"])
            of_query = block.joined_rows(of_query, build.add("Add", [old, mine]))
            sums = build.add("Add", [sums, theirs])
            travels["sums"] = block.joined_columns(travels["sums"], sums)
        assert of_query is not None
        sums = travels["sums"]
        if self.is_ring:
            sums = self.shift(sums, self.count - 1)
        else:
            of_query = build.all_reduce(of_query, ["t"])
            sums = build.all_reduce(sums, ["s"])
        of_query = build.add("Mul", [of_query, like_head(build, op.scale)])
        gradients = [
            self.restored(of_query, "s"),
            *self.split(self.restored(sums, "t"), self.widths),
        ]
        for i, (gradient, factors) in enumerate(zip(gradients, ("kgd", "kd", "ke"), strict=True)):
            if has_output(build, i):
                finish(build, "Identity", [op.joined_heads(build, gradient, factors)], i)

    def _rows(self) -> gs.Tensor:
        """Returns a tensor with a row for each query, which stays on the query's rank: the scaled
        query, the gradient of its result, the sum of this gradient times the result, the largest
        score and the sum of exponentials."""
        build, op = self.build, self.op
        query = build.add("Mul", [op.by_head(build, 0), like_head(build, op.scale)])
        dy, y = (widen(build, op.cut_results(build, i)) for i in (DY, Y))
        delta = build.add("ReduceSum", [build.add("Mul", [dy, y])], axes=[3], keepdims=1)
        return build.add("Concat", [query, dy, delta, build.input(SUMMARY)], axis=3)

    def _gradients(
        self, block: Block, rows: gs.Tensor, pair: gs.Tensor
    ) -> tuple[gs.Tensor, gs.Tensor]:
        """Returns the terms that one block contributes: (gradient of its queries, gradients of its
        keys and values concatenated).

        rows  the result of `_rows`
        pair  the block's keys and values, concatenated
        """
        build = self.build
        widths = [*self.widths, 1, 1, 1]
        query, dy, delta, largest, total = self.split(block.cut_rows(rows), widths)
        key, value = (widen(build, x) for x in self.split(block.cut_columns(pair), self.widths))
        query, dy = block.grouped(query), block.grouped(dy)
        products = block.by_head(build.add("MatMul", [query, self._turned(key)]))
        capped = self.op.capped(build, products)
        scores = block.masked(capped)
        powers = build.add("Exp", [build.add("Sub", [scores, largest])])
        weights = build.add("Div", [powers, total])
        of_weights = block.by_head(build.add("MatMul", [dy, self._turned(value)]))
        of_scores = build.add("Mul", [weights, build.add("Sub", [of_weights, delta])])
        cap = self.op.attrs.get("softcap", 0.0)
        if cap:
            bent = build.add("Div", [capped, like(capped, cap)])
            slope = build.add("Sub", [like(bent, 1), build.add("Mul", [bent, bent])])
            of_scores = build.add("Mul", [of_scores, slope])
        weights, of_scores = block.grouped(weights), block.grouped(of_scores)
        of_query = block.by_head(build.add("MatMul", [of_scores, key]))
        of_key = build.add("MatMul", [self._turned(of_scores), query])
        of_value = build.add("MatMul", [self._turned(weights), dy])
        return of_query, build.add("Concat", [of_key, of_value], axis=3)

    def _turned(self, x: gs.Tensor) -> gs.Tensor:
        """Swaps the last two dimensions of `x`."""
        return self.build.add("Transpose", [x], perm=[0, 1, 3, 2])
