"""The pairs of an expert and a row that a router chose, sorted by expert, then by row."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.lowering.added_nodes import AddedNodes
from onnxpar.sharding.chosen_rows import RANK, Shapes


class Pairs:
    """Adds nodes that work on the pairs for which `chosen` [expert, row, 1] is true.

    picks   [expert, row]: 1 for each pair
    expert  [pair], and `row`: their numbers; `places` [pair, 2] has both
    """

    def __init__(self, nodes: AddedNodes, chosen: gs.Tensor, shapes: Shapes) -> None:
        self.add, self.shapes = nodes.add, shapes
        self.table: gs.Tensor | None = None
        self.experts, self.rows, _ = shapes[chosen.name]
        mask = self.add("Squeeze", [chosen], bool, axes=[2])
        self.picks = self.add("Cast", [mask], np.int64, to=7)
        found = self.add("NonZero", [mask], np.int64)
        self.expert = self.add("Gather", [found, 0], np.int64, axis=0)
        self.row = self.add("Gather", [found, 1], np.int64, axis=0)
        self.places = self.add("Transpose", [found], np.int64, perm=[1, 0])

    def of_tokens(self, tokens: gs.Tensor) -> gs.Tensor:
        """The row of each pair, [pair, column]."""
        found = self.beside(tokens)
        is_flat = len(self.shapes[tokens.name]) < RANK
        return found if is_flat else self.add("Squeeze", [found], tokens.dtype, axes=[0])

    def as_rows(self, x: gs.Tensor) -> gs.Tensor:
        """[pair, column] as [1, pair, column]: as the rows of one expert."""
        return self.add("Unsqueeze", [x], x.dtype, axes=[0])

    def beside(self, tensor: gs.Tensor) -> gs.Tensor:
        """What an operand of [expert, row, column] has for each pair, as [1, pair, column], or
        [pair, column] if it has no dimension of experts."""
        shape = self.shapes.get(tensor.name, ())
        if not tensor.name or len(shape) < RANK - 1:
            return tensor
        if len(shape) == RANK and shape[0] == self.experts:
            if shape[1] == self.rows:
                return self.as_rows(self.add("GatherND", [tensor, self.places], tensor.dtype))
            found = self.add("Gather", [tensor, self.expert], tensor.dtype, axis=0)
            return self.add("Transpose", [found], tensor.dtype, perm=[1, 0, 2])
        at = len(shape) - 2
        if shape[at] != self.rows:
            return tensor
        return self.add("Gather", [tensor, self.row], tensor.dtype, axis=at)

    def sum(self, y: gs.Tensor, total: gs.Tensor, zeros: gs.Tensor, keeps: bool = False) -> None:
        """Adds up the pairs of each row of `y` [1, pair, column], to [row, column], or [1, row,
        column] with `keeps`; `zeros` are [1, column]."""
        flat = self.add("Squeeze", [y], y.dtype, axes=[0])
        padded = self.add("Concat", [zeros, flat], y.dtype, axis=0)
        if self.table is None:
            self.table = self._table(f"{total.name}/empty")
        picked = self.add("Gather", [padded, self.table], y.dtype, axis=0)
        self.add("ReduceSum", [picked], y.dtype, total, axes=[0], keepdims=int(keeps))

    def _table(self, name: str) -> gs.Tensor:
        """The places of each row's pairs, counted from 1, one below the other, and 0 where a row
        has fewer pairs than others; at place 0 are zeros. So no element is written twice."""
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
