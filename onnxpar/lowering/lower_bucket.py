"""Several collectives of one kind as one: what they move stands in one row per member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.layout.layout import Layout, split_count
from onnxpar.layout.mesh import parts_over
from onnxpar.lowering.lower_reshard import ReshardBuilder, changed_dims, is_run, local_shape


class BucketBuilder(ReshardBuilder):
    """Replaces a fused reshard node by a rank's own nodes.

    Parts of a reduce-scatter or an all-gather are equal on all ranks: they become rows of a matrix
    with a row for each member, which are joined along the columns.
    """

    def build(self) -> list[gs.Node]:
        """The nodes, in order; the last makes the last of the results."""
        self.members = list(zip(self.inputs, self.outputs, self.node.attrs["members"], strict=True))
        {
            "AllReduce": self._reduce,
            "ReduceScatter": self._scatter,
            "AllGather": self._gather,
        }[self.node.op]()
        return self.built

    def _reduce(self) -> None:
        """Several all-reduces as one: their elements in a row."""
        flat = [self._shaped(x, [-1], f"flat{i}") for i, x in enumerate(self.inputs)]
        joined, summed = self._fresh(flat[0], "joined"), self._fresh(flat[0], "summed")
        self._add("Concat", flat, joined, axis=0)
        self._collective("AllReduce", joined, summed, op=self.before.reduce)
        befores = [before for _, _, (before, _) in self.members]
        for i, piece in enumerate(self._pieces(summed, befores, 0)):
            self._reshape(piece, befores[i], self.outputs[i])

    def _scatter(self) -> None:
        """Several reduce-scatters as one: each row has what one member gets of all."""
        rows, count = [], parts_over(self.axes)
        for i, (x, _, (before, after)) in enumerate(self.members):
            (axis,) = changed_dims(before, after)
            x = self._by_member(x, axis, before.dims[axis], after.dims[axis], f"ordered{i}")
            rows.append(self._rows(x, before, axis, count, f"rows{i}"))
        joined, summed = self._fresh(rows[0], "joined"), self._fresh(rows[0], "summed")
        self._add("Concat", rows, joined, axis=1)
        how = {"axis": 0, "sizes": [1] * count, "op": self.before.reduce}
        self._collective("ReduceScatter", joined, summed, **how)
        afters = [after for _, _, (_, after) in self.members]
        for i, piece in enumerate(self._pieces(summed, afters, 1)):
            self._reshape(piece, afters[i], self.outputs[i])

    def _gather(self) -> None:
        """Several all-gathers as one: each row has what one member gives of all."""
        count = parts_over(self.axes)
        rows = [self._shaped(x, [1, -1], f"row{i}") for i, x in enumerate(self.inputs)]
        joined, gathered = self._fresh(rows[0], "joined"), self._fresh(rows[0], "gathered")
        self._add("Concat", rows, joined, axis=1)
        self._collective("AllGather", joined, gathered, axis=0, sizes=[1] * count)
        befores = [before for _, _, (before, _) in self.members]
        pieces = self._pieces(gathered, befores, 1)
        for i, (_, y, (before, after)) in enumerate(self.members):
            (axis,) = changed_dims(before, after)
            dim = before.dims[axis]
            whole = y if is_run(dim) else self._fresh(y, f"whole{i}")
            self._whole(pieces[i], before, axis, count, whole, i)
            if whole is not y:
                held = partial(self._joined, dim)
                self._order(whole, y, axis, held, after.dims[axis])

    def _rows(self, x: gs.Tensor, before: Layout, axis: int, count: int, what: str) -> gs.Variable:
        """A row for each part of a dimension, whatever dimensions stand before it."""
        if axis:

            def apart(rank: int) -> list[int]:
                outer, inner = self._around(before, rank, axis)
                return [outer, count, inner // count]

            x = self._swapped(x, apart, what)
        return self._shaped(x, [count, -1], what)

    def _swapped(self, x: gs.Tensor, sizes: Callable[[int], list[int]], what: str) -> gs.Variable:
        """The elements in these three dimensions, with the two outer ones in the other order."""
        apart, turned = self._fresh(x, f"{what}.apart"), self._fresh(x, f"{what}.turned")
        self._resized(x, lambda rank: np.array(sizes(rank), np.int64), [2], apart)
        self._add("Transpose", [apart], turned, perm=[1, 0, 2])
        return turned

    def _whole(
        self, piece: gs.Tensor, before: Layout, axis: int, count: int, y: gs.Tensor, number: int
    ) -> None:
        """The inverse, of rows that all members have given."""

        def shape(rank: int) -> Array:
            own = local_shape(before, self.mesh, rank)
            own[axis] *= count
            return own

        def apart(rank: int) -> list[int]:
            outer, inner = self._around(before, rank, axis)
            return [count, outer, inner]

        if axis:
            piece = self._swapped(piece, apart, f"rows{number}")
        others = [i for i, dim in enumerate(before.dims) if i != axis and split_count(dim) > 1]
        self._resized(piece, shape, others, y)

    def _around(self, layout: Layout, rank: int, axis: int) -> tuple[int, int]:
        """How many elements the dimensions before one have on a rank, and those from it on."""
        shape = local_shape(layout, self.mesh, rank)
        return int(np.prod(shape[:axis], dtype=int)), int(np.prod(shape[axis:], dtype=int))

    def _pieces(self, x: gs.Tensor, layouts: Sequence[Layout], axis: int) -> list[gs.Variable]:
        """A dimension cut into the elements of a rank's parts of these layouts."""

        def sizes(rank: int) -> Array:
            shapes = [layout.local_shape(self.mesh, rank) for layout in layouts]
            return np.array([np.prod(s, dtype=np.int64) for s in shapes])

        pieces = [self._fresh(t, f"piece{i}") for i, t in enumerate(self.inputs)]
        self._split(x, sizes, pieces, axis)
        return pieces

    def _split(
        self, x: gs.Tensor, sizes: Callable[[int], Array], results: list[gs.Variable], axis: int
    ) -> None:
        """Cuts a dimension; sizes are an attribute before opset 13."""
        name = f"{self.node.name}::Split"
        if self.opset >= 13:
            operands = [x, self._varying("sizes", sizes)]
            self.built.append(gs.Node("Split", name, {"axis": axis}, operands, results))
            return
        self.per_rank.attributes[name, "split"] = lambda rank: sizes(rank).tolist()
        attrs = {"axis": axis, "split": sizes(0).tolist()}
        self.built.append(gs.Node("Split", name, attrs, [x], results))

    def _shaped(self, x: gs.Tensor, shape: Sequence[int], what: str) -> gs.Variable:
        """A tensor in a shape that all ranks have."""
        y = self._fresh(x, what)
        self._add("Reshape", [x, self._constant(f"{what}.shape", np.array(shape))], y)
        return y
