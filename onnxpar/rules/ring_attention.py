"""Attention over shards of the queries; the shards of keys and values travel in a ring.

Each rank attends with its own queries to one shard of keys after the other, and keeps for each
query the largest score, the sum of exponentials, and the weighted sum of values so far (Liu et
al., "Ring Attention with Blockwise Transformers", 2023). So no rank holds all keys, or all scores
of a query. Keys that no query of a rank sees are skipped. In causal attention, each rank computes
an early and a late part of the sequence, so that all ranks have equal work (zigzag).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.rules.attention_lowering import AttentionLowering, powers_of
from onnxpar.rules.communicate import finish, has_output, like, widen
from onnxpar.rules.ring import Block, Ring, like_head
from onnxpar.rules.rule import Lowering


class RingAttention(AttentionLowering):
    """Replaces an Attention node whose queries or keys are split: by a ring if both are split over
    the same axes, else as `AttentionLowering` does."""

    def lower(self, build: Lowering) -> None:
        """Adds the nodes for a rank that holds shards of the queries, the keys or both."""
        if build.shares_axes("s", "t"):
            AttentionRing(self, build).lower()
        else:
            super().lower(build)


@dataclass
class State:
    """The results for each of a rank's queries, after some blocks of keys.

    largest  the largest score
    total    the sum of exp(score - largest)
    values   the sum of values weighted by exp(score - largest)
    """

    largest: gs.Tensor
    total: gs.Tensor
    values: gs.Tensor


class AttentionRing(Ring):
    """Builds the nodes that a rank runs in place of one Attention. Subclasses change how scores are
    computed, and what is returned."""

    def lower(self) -> None:
        """Attends to one block of keys after the other, and makes the results of the node."""
        query, pair = self.query(), self.pair()
        if self.places():
            query, pair = self.placed(query, "s"), self.placed(pair, "t")
        travels = {"pair": pair}
        state: State | None = None
        for block in self.blocks(travels):
            state = self._attend(block, query, travels["pair"], state)
        assert state is not None
        self.finish(self._combined(state))

    def query(self) -> gs.Tensor:
        """Returns the queries times the scale, (batch, heads, sequence, width)."""
        query = self.op.by_head(self.build, 0)
        return self.build.add("Mul", [query, like_head(self.build, self.op.scale)])

    def pair(self) -> gs.Tensor:
        """Returns keys and values concatenated along the width, (batch, key heads, sequence,
        width), so that both travel in one message."""
        build, op = self.build, self.op
        return build.add("Concat", [op.cut_heads(build, 1), op.cut_heads(build, 2)], axis=3)

    def scored(self, block: Block, products: gs.Tensor) -> gs.Tensor:
        """Returns the scores of a block with soft cap and masks, from the products of queries and
        keys."""
        return block.masked(self.op.capped(self.build, products))

    def powers(self, scores: gs.Tensor, largest: gs.Tensor) -> gs.Tensor:
        """Returns exp(scores - largest); before opset 25, zeros for queries that see no key."""
        return powers_of(self.build, scores, largest, like(scores, self.least))

    def _attend(
        self, block: Block, query: gs.Tensor, pair: gs.Tensor, state: State | None
    ) -> State:
        """Returns the state after the queries have attended to the keys of one more block. `pair`
        has the block's keys and values; `state` is None for the first block."""
        build = self.build
        key, value = self.split(
            block.cut_columns(pair), [build.local.size("d"), build.local.size("e")]
        )
        key = build.add("Transpose", [widen(build, key)], perm=[0, 1, 3, 2])
        mine = block.grouped(block.cut_rows(query))
        scores = self.scored(block, block.by_head(build.add("MatMul", [mine, key])))
        largest = build.add("ReduceMax", [scores], axes=[3], keepdims=1)
        largest = build.add("Max", [largest, like(scores, self.least)])
        old = None if state is None else self._part(block, state)
        if old is not None:
            largest = build.add("Max", [largest, old.largest])
        powers = self.powers(scores, largest)
        total = build.add("ReduceSum", [powers], axes=[3], keepdims=1)
        value = widen(build, value)
        values = block.by_head(build.add("MatMul", [block.grouped(powers), value]))
        if state is None or old is None:
            return State(largest, total, values)
        share = build.add("Exp", [build.add("Sub", [old.largest, largest])])
        total = build.add("Add", [build.add("Mul", [old.total, share]), total])
        values = build.add("Add", [build.add("Mul", [old.values, share]), values])
        return State(
            block.joined_rows(state.largest, largest),
            block.joined_rows(state.total, total),
            block.joined_rows(state.values, values),
        )

    def _part(self, block: Block, state: State) -> State:
        """The state of the queries that take part in a block."""
        return State(*(block.cut_rows(x) for x in (state.largest, state.total, state.values)))

    def _combined(self, state: State) -> State:
        """Returns the state over all keys: the state after the ring's last step or, without a ring,
        the combination by all-reduces of the states of ranks with other keys."""
        build = self.build
        if self.is_ring or not build.local.is_split("t"):
            return state
        largest = build.all_reduce(state.largest, ["t"], "max")
        share = build.add("Exp", [build.add("Sub", [state.largest, largest])])
        parts = [build.add("Mul", [x, share]) for x in (state.total, state.values)]
        both = build.all_reduce(build.add("Concat", parts, axis=3), ["t"])
        return State(largest, *self.split(both, [1, build.local.size("e")]))

    def finish(self, state: State) -> None:
        """Makes the results of the node from the state over all keys."""
        build, op = self.build, self.op
        self.finish_mean(self.restored(self.mean(state), "s"))
        for i in (1, 2):
            if has_output(build, i):
                build.finish("Identity", [op.cut_heads(build, i)], i)

    def mean(self, state: State) -> gs.Tensor:
        """Returns the weighted mean of the values; zero for a query that sees no key."""
        build = self.build
        is_zero = build.add("Equal", [state.total, like(state.total, 0)])
        total = build.add("Where", [is_zero, like(state.total, 1), state.total])
        return build.add("Div", [state.values, total])

    def finish_mean(self, result: gs.Tensor) -> None:
        """Makes result 0 of the node from `result`, (batch, heads, sequence, width)."""
        finish(self.build, "Identity", [self.op.joined_heads(self.build, result, "kge")])


class SummarizedRing(AttentionRing):
    """Builds the nodes of an Attention that also returns a summary for its gradient: for each
    query, the largest score and the sum of exp(score - largest); the sum is infinity for a query
    that sees no key. (A single log-sum-exp would lose the sum in rounding beside a large score,
    such as of masked keys.)"""

    def finish(self, state: State) -> None:
        """Makes the results of the node, the mean and the summary, from the state over all keys."""
        build, mean = self.build, self.mean(state)
        if not has_output(build, 1):
            self.finish_mean(self.restored(mean, "s"))
            return
        is_zero = build.add("Equal", [state.total, like(state.total, 0)])
        total = build.add("Where", [is_zero, like(state.total, np.inf), state.total])
        rows = self.restored(build.add("Concat", [mean, state.largest, total], axis=3), "s")
        mean, summary = self.split(rows, [build.local.size("e"), 2])
        self.finish_mean(mean)
        build.finish("Identity", [summary], 1)
