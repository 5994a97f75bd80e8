"""Weighs whether to split the hidden units of recurrent ops (RNN, GRU, LSTM): the split costs a
collective in every time step, so it pays only for large weights."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from onnxpar.cost.cost import Costs
from onnxpar.graph.tensors import numel, numpy_dtype
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.rules.recurrence_lowering import GATES
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.strategy.strategy import NodeAnnotation

WEIGHTS = (1, 2)
"""The indices of the two weights among a recurrent op's operands: of the input, and of the
state."""
MOVES = {"Transpose", "Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze", "Slice", "Split"}
"""Ops that do not change values."""


def is_recurrence(node: gs.Node) -> bool:
    """True for a recurrent op. If its hidden units are split, ranks gather the state in every time
    step."""
    return node.op in GATES and node.domain in (None, "", "ai.onnx")


def recurrences(weight: gs.Tensor) -> Iterator[gs.Node]:
    """Yields the recurrent ops that multiply by a weight, directly or after ops that move, cast or
    join the weight."""
    for node in weight.outputs:
        if is_recurrence(node):
            yield from [node] if any(node.inputs[i] is weight for i in WEIGHTS) else []
        elif node.op in {*MOVES, "Concat"}:
            for result in node.outputs:
                yield from recurrences(result)


class Recurrences:
    """The costs and savings of splitting the hidden units of a graph's recurrent ops over `axes`.
    The unit is the time of a small collective."""

    def __init__(self, factors: GraphFactors, costs: Costs, axes: Axes) -> None:
        self.costs, self.axes = costs, axes
        self.small = costs.collective("AllGather", axes, 0)
        self.ops = {
            op.node.name: op
            for op in factors.ops
            if is_recurrence(op.node) and "h" in op.rule.sizes  # else the op stays whole
        }

    def collectives(self, op: OpFactors) -> int:
        """Returns the cost of the collectives in all time steps of a recurrent op, in small
        collectives, at least 1."""
        sizes = op.rule.sizes
        state = 4 * (sizes["b"] or 1) * (sizes["d"] or 1) * (sizes["h"] or 1)
        step_seconds = self.costs.collective("AllGather", self.axes, state)
        return max(1, round((sizes["s"] or 1) * step_seconds / self.small))

    def price(self, weight: gs.Tensor) -> float:
        """Returns the cost of a weight that stays whole, in small collectives: the time to gather
        it and to multiply by all of it on every rank. 0 for a weight that no recurrent op reads."""
        names = dict.fromkeys(node.name for node in recurrences(weight))
        ops = [self.ops[name] for name in names if name in self.ops]
        if not ops:
            return 0.0
        elements = numel(weight.shape)
        size = elements * numpy_dtype(weight).itemsize
        rows = sum((op.rule.sizes["s"] or 1) * (op.rule.sizes["b"] or 1) for op in ops)
        wasted = 2 * elements * rows * (1 - 1 / parts_over(self.axes))
        gathering = self.costs.collective("AllGather", self.axes, size)
        return (gathering + self.costs.compute(wasted, 0)) / self.small

    def annotations(self, chosen: set[int], axes: Axes) -> Iterator[NodeAnnotation]:
        """Yields annotations that split, over `axes`, the hidden units whose atoms (parts of
        dimensions) are in `chosen`."""
        for op in self.ops.values():
            split = {
                i: axes
                for i, leaf in enumerate(op.leaves)
                if leaf.factor == "h" and leaf.atom in chosen and leaf.size >= parts_over(axes)
            }
            if split:
                yield NodeAnnotation(op, split, {})
