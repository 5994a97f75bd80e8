"""The pairs of an expert and a row that a router has chosen, sorted by expert, then by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.lowering.added_nodes import AddedNodes
from onnxpar.sharding.expert_rows import Shapes


class Pairs:
    """Adds nodes that find the pairs for which `chosen` [expert, row, 1] is true, and work on them.

    nodes        gets the nodes
    shapes       global shapes of tensors, by name

    own          the number of experts of each rank
    most         the most experts of a rank
    picks        [expert, row]: 1 for each pair
    expert, row  [pair]: the index of the pair's expert, and of its row
    places       [pair, 2]: both indices
    """

    def __init__(
        self, nodes: AddedNodes, chosen: gs.Tensor, shapes: Shapes, own: Sequence[int]
    ) -> None:
        self.nodes, self.add, self.shapes, self.own = nodes, nodes.add, shapes, own
        self.most, self.is_even = max(own), len(set(own)) == 1
        self.table: gs.Tensor | None = None
        self.experts, self.rows, _ = shapes[chosen.name]
        mask = self.add("Squeeze", [chosen], bool, axes=[2])
        self.picks = self.add("Cast", [mask], np.int64, to=7)
        indices = self.add("NonZero", [mask], np.int64)
        self.expert = self.add("Gather", [indices, 0], np.int64, axis=0)
        self.row = self.add("Gather", [indices, 1], np.int64, axis=0)
        self.places = self.add("Transpose", [indices], np.int64, perm=[1, 0])

    @cached_property
    def counts(self) -> gs.Tensor:
        """The number of rows that are chosen for each expert, [expert], with 0 for experts that a
        rank lacks."""
        counts = self.add("ReduceSum", [self.picks], np.int64, axes=[1], keepdims=0)
        if self.is_even:
            return counts
        more = self.nodes.constant("more", lambda rank: [0] * (self.most - self.own[rank]))
        return self.add("Concat", [counts, more], np.int64, axis=0)

    @cached_property
    def numbers(self) -> Sequence[gs.Tensor]:
        """The index of each of `most` experts; on a rank with fewer experts, the index of its last
        one instead."""

        def number(expert: int) -> gs.Constant:
            return self.nodes.constant(
                f"expert.{expert}", lambda rank: min(expert, self.own[rank] - 1)
            )

        return [number(expert) for expert in range(self.most)]

    def split(self, x: gs.Tensor, axis: int, name: str) -> Sequence[gs.Tensor]:
        """Returns the parts of `x` for each expert: splits dimension `axis`, that of the pairs of
        expert and row, which are sorted by expert, by a node called `name`. The parts of experts
        that a rank lacks are empty."""
        parts = [gs.Variable(f"{name}.{i}", x.dtype) for i in range(self.most)]
        self.nodes.note(gs.Node("Split", name, {"axis": axis}, [x, self.counts], parts))
        return parts

    def as_rows(self, x: gs.Tensor) -> gs.Tensor:
        """Returns `x`, [pair, column], as [1, pair, column], the form that the rows of one expert
        have."""
        return self.add("Unsqueeze", [x], x.dtype, axes=[0])

    def is_of_experts(self, tensor: gs.Tensor) -> bool:
        """True for a tensor [expert, 1, column]."""
        return self.shapes.get(tensor.name, ())[:-1] == (self.experts, 1)

    def has_rows(self, tensor: gs.Tensor) -> bool:
        """True for a tensor whose last dimension but one is that of rows."""
        return self.shapes.get(tensor.name, ())[-2:-1] == (self.rows,)

    def beside(self, tensor: gs.Tensor) -> gs.Tensor:
        """Returns an operand of an elementwise node for the chosen pairs of expert and row:
        [expert, row, column] and [expert, 1, column] become [1, pair, column]; [row, column]
        becomes [pair, column]; other operands stay as they are."""
        shape = self.shapes.get(tensor.name, ())
        if self.is_of_experts(tensor):
            parts = self.add("Gather", [tensor, self.expert], tensor.dtype, axis=0)
            return self.as_rows(self.add("Squeeze", [parts], tensor.dtype, axes=[1]))
        if not self.has_rows(tensor):
            return tensor
        if shape[:-2] == (self.experts,):
            return self.as_rows(self.add("GatherND", [tensor, self.places], tensor.dtype))
        return self.add("Gather", [tensor, self.row], tensor.dtype, axis=len(shape) - 2)

    def target_shape(
        self, op: str, result: gs.Tensor, columns: Callable[[gs.Tensor, int], Sequence[int]]
    ) -> gs.Constant:
        """Returns the shape operand of an Expand or a Reshape (`op`) whose result is [1, pair,
        column], with a place for each chosen pair of expert and row. `columns` has the sizes of
        `result` on a rank, behind the dimensions of experts and rows."""
        pairs = 1 if op == "Expand" else 0  # 0: Reshape copies the size
        return self.nodes.constant(
            f"{result.name}/shape", lambda rank: [1, pairs, *columns(result, rank)]
        )

    def sum(
        self, parts: Sequence[gs.Tensor], total: gs.Tensor, zeros: gs.Tensor, keeps: bool = False
    ) -> None:
        """Makes `total`, [row, column], or with `keeps` [1, row, column]: for each row, the sum of
        what its chosen experts have computed.

        parts  the results of the pairs of expert and row, [1, pair, column] when concatenated
        zeros  [1, 1, column], added for rows with fewer experts than others
        """
        padded = self.add("Concat", [zeros, *parts], total.dtype, axis=1)
        if self.table is None:
            self.table = self._table(f"{total.name}/empty")
        picked = self.add("Gather", [padded, self.table], total.dtype, axis=1)
        axes = [1] if keeps else [0, 1]
        self.add("ReduceSum", [picked], total.dtype, total, axes=axes, keepdims=0)

    def _table(self, name: str) -> gs.Tensor:
        """Returns a tensor [slot, row]: for each row, the numbers of the pairs that chose it, which
        count from 1. A row with fewer pairs than others has 0 in its last slots: the place of the
        zeros. `name` is that of the new constant."""
        add = self.add
        of_row = add("ReduceSum", [self.picks], np.int64, axes=[0], keepdims=0)
        one = add("Concat", [of_row, [1]], np.int64, axis=0)
        most = add("ReduceMax", [one], np.int64, keepdims=1)
        rows = add("Shape", [of_row], np.int64)
        sizes = add("Concat", [most, rows], np.int64, axis=0)
        empty = add("ConstantOfShape", [sizes], np.int64, value=_zero(name))
        seen = add("Sub", [add("CumSum", [self.picks, 0], np.int64), 1], np.int64)
        slot = add("GatherND", [seen, self.places], np.int64)
        slot, row = (add("Unsqueeze", [t], np.int64, axes=[1]) for t in (slot, self.row))
        where = add("Concat", [slot, row], np.int64, axis=1)
        count = add("Squeeze", [add("Shape", [self.row], np.int64)], np.int64, axes=[0])
        end = add("Add", [count, 1], np.int64)
        place = add("Range", [1, end, 1], np.int64)
        return add("ScatterND", [empty, where, place], np.int64)


def _zero(name: str) -> gs.Constant:
    return gs.Constant(name, np.zeros(1, np.int64))
