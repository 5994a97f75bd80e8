"""Ring attention whose scales and masks are separate ops in the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.rules.attention_lowering import AttentionLowering
from onnxpar.rules.communicate import finish, like
from onnxpar.rules.ring import Block
from onnxpar.rules.ring_attention import AttentionRing, State
from onnxpar.rules.rule import Lowering


class ScoreRing(AttentionRing):
    """Builds the nodes of a ScoredAttention, whose `steps` compute each score: "Add . 3" adds
    operand 3 to the score (`ExportedAttention`).

    Unlike in ONNX's Attention, if all scores of a query are the least number, the query attends to
    all keys equally; if all scores are minus infinity, its result is NaN or, if `is_guarded`, zero.
    """

    reads_lengths = False

    def __init__(
        self, op: AttentionLowering, build: Lowering, steps: Sequence[str], is_guarded: bool
    ) -> None:
        super().__init__(op, build)
        self.steps = steps
        self.is_guarded = is_guarded
        self.is_long = len(build.shape(build.input(0))) == 4

    def mask_operands(self) -> list[int]:
        """Returns the indices of all operands behind queries, keys and values: the steps may read
        them as masks."""
        return list(range(3, len(self.build.local.node.inputs)))

    def query(self) -> gs.Tensor:
        """Returns the queries, (batch, heads, sequence, width), without a scale, which is one of
        the steps."""
        return self._operand(0)

    def pair(self) -> gs.Tensor:
        """Returns keys and values concatenated along the width, (batch, key heads, sequence,
        width)."""
        key = self.build.add("Transpose", [self._operand(1)], perm=[0, 1, 3, 2])
        return self.build.add("Concat", [key, self._operand(2)], axis=3)

    def _operand(self, index: int) -> gs.Tensor:
        """Returns operand 0, 1 or 2 (queries, keys or values) with four dimensions; a batch of 1 is
        added to an operand with three."""
        x = self.build.input(index)
        return x if self.is_long else self.build.add("Unsqueeze", [x], axes=[0])

    def scored(self, block: Block, products: gs.Tensor) -> gs.Tensor:
        """Returns the scores of a block: applies the steps to the products of queries and keys."""
        score = products
        for step in self.steps:
            op, *operands = step.split()
            read = [score if name == "." else block.mask(int(name)) for name in operands]
            score = self.build.add(op, read)
        return score

    def powers(self, scores: gs.Tensor, largest: gs.Tensor) -> gs.Tensor:
        """Returns exp(scores - largest)."""
        return self.build.add("Exp", [self.build.add("Sub", [scores, largest])])

    def mean(self, state: State) -> gs.Tensor:
        """Returns the weighted mean of the values; zero if there is no key, and if `is_guarded`,
        for each query that sees none."""
        build, total = self.build, state.total
        if not self.is_guarded and build.local.may_be_empty("t"):
            keys = sum(build.of_members("t", lambda local: local.size("t")))
            is_none = build.add("Equal", [np.array([keys]), np.array([0])])
            total = build.add("Where", [is_none, like(total, 1), total])
        mean = build.add("Div", [state.values, total])
        if not self.is_guarded:
            return mean
        sees = build.add("Greater", [state.total, like(state.total, 0)])
        return build.add("Where", [sees, mean, like(mean, 0)])

    def finish(self, state: State) -> None:
        """Makes the result of the node from the state over all keys."""
        mean = self.mean(state)
        if not self.is_long:
            mean = self.build.add("Squeeze", [mean], axes=[0])
        finish(self.build, "Identity", [mean])
