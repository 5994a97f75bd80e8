"""Lowers a fused reshard: a single collective moves several tensors, flattened and concatenated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.layout.layout import Layout, local_size
from onnxpar.layout.mesh import parts_over
from onnxpar.lowering.buckets import held_dim
from onnxpar.lowering.lower_reshard import ReshardBuilder, changed_dims, is_run, local_shape


class BucketBuilder(ReshardBuilder):
    """Replaces a fused reshard node by the nodes that a rank runs.

    In a reduce-scatter or all-gather, all ranks have shards of equal size. Each tensor becomes a
    matrix with a row for each rank of the group, and the matrices are concatenated along the
    columns: [4, 6] and [2, 2] over 2 ranks become [2, 12 + 2].
    """

    def build(self) -> list[gs.Node]:
        """Returns the nodes of a rank, in order; the last node computes the last result."""
        self.members = list(zip(self.inputs, self.outputs, self.reshard.members, strict=True))
        {
            "AllReduce": self._reduce,
            "ReduceScatter": self._scatter,
            "AllGather": self._gather,
            "AllToAll": self._exchange,
        }[self.node.op]()
        return self.built

    def _reduce(self) -> None:
        """Adds one all-reduce of all tensors, flattened and concatenated."""
        flat = [self._shaped(x, [-1], f"flat{i}") for i, x in enumerate(self.inputs)]
        joined, summed = self._fresh(flat[0], "joined"), self._fresh(flat[0], "summed")
        self._add("Concat", flat, joined, axis=0)
        self._collective("AllReduce", joined, summed, op=self.before.reduce)
        befores = [before for _, _, (before, _) in self.members]
        for i, piece in enumerate(self._pieces(summed, befores, 0)):
            self._reshape(piece, befores[i], self.outputs[i])

    def _scatter(self) -> None:
        """Adds one reduce-scatter of a matrix in which each row has all shards that one rank
        receives."""
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
        """Adds one all-gather of a matrix in which each row has all shards that one rank sends."""
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

    def _exchange(self) -> None:
        """Adds one all-to-all of all tensors of the bucket. The tensors are concatenated along the
        dimension that `held_dim` returns, in the order of the ranks that hold it, so each rank
        sends and receives contiguous shards."""
        held_and_side = held_dim(*self.reshard.members[0])
        assert held_and_side is not None
        held, is_before = held_and_side
        (other,) = (i for i in changed_dims(*self.reshard.members[0]) if i != held)
        group = self.mesh.group(self.axes, 0)

        def holder(number: int) -> int:
            dim = self.reshard.members[number][0 if is_before else 1].dims[held]
            return next(i for i, rank in enumerate(group) if local_size(dim, self.mesh, rank))

        order = sorted(range(len(self.members)), key=holder)
        members = [self.reshard.members[i] for i in order]

        def together(rank: int) -> list[int]:
            """Returns, for each member of the group, its number of elements of the gathered
            dimension in all tensors."""
            sizes = [self._sizes(layouts[0 if is_before else 1].dims[held]) for layouts in members]
            return [sum(column) for column in zip(*(of(rank) for of in sizes), strict=True)]

        before, after = members[0]
        joined, moved = (self._fresh(self.inputs[0], what) for what in ("joined", "moved"))
        self._add("Concat", [self.inputs[i] for i in order], joined, axis=held)
        apart = self._sizes((after if is_before else before).dims[other])
        self._collective(
            "AllToAll",
            joined,
            moved,
            split_axis=other if is_before else held,
            concat_axis=held if is_before else other,
            split_sizes=apart if is_before else together,
            concat_sizes=together if is_before else apart,
        )

        def sizes(rank: int) -> Array:
            return np.array([local_size(a.dims[held], self.mesh, rank) for _, a in members])

        self._split(moved, sizes, [self.outputs[i] for i in order], held)

    def _rows(self, x: gs.Tensor, before: Layout, axis: int, count: int, what: str) -> gs.Variable:
        """Returns `x`, of the layout `before`, as a matrix with a row for each of the `count`
        shards of dimension `axis`: the dimensions before `axis` move into the columns. `what` is a
        part of the new tensors' names."""
        if axis:

            def apart(rank: int) -> list[int]:
                outer, inner = self._around(before, rank, axis)
                return [outer, count, inner // count]

            x = self._swapped(x, apart, what)
        return self._shaped(x, [count, -1], what)

    def _swapped(self, x: gs.Tensor, sizes: Callable[[int], list[int]], what: str) -> gs.Variable:
        """Returns `x` reshaped to three dimensions, of `sizes(rank)`, with the first two swapped.
        `what` is a part of the new tensors' names."""
        apart, swapped = self._fresh(x, f"{what}.apart"), self._fresh(x, f"{what}.turned")
        self._resized(x, lambda rank: np.array(sizes(rank), np.int64), apart)
        self._add("Transpose", [apart], swapped, perm=[1, 0, 2])
        return swapped

    def _whole(
        self, piece: gs.Tensor, before: Layout, axis: int, count: int, y: gs.Tensor, number: int
    ) -> None:
        """Computes `y`, number `number` of the results, which is whole along `axis`: the inverse of
        `_rows`. `piece` has the columns of `y` in the gathered matrix, a row for each of `count`
        ranks; `before` is the layout of a shard."""

        def shape(rank: int) -> Array:
            sizes = local_shape(before, self.mesh, rank)
            sizes[axis] *= count
            return sizes

        def apart(rank: int) -> list[int]:
            outer, inner = self._around(before, rank, axis)
            return [count, outer, inner]

        if axis:
            piece = self._swapped(piece, apart, f"rows{number}")
        self._resized(piece, shape, y)

    def _around(self, layout: Layout, rank: int, axis: int) -> tuple[int, int]:
        """Returns two numbers of elements of a rank's shard: the product of the sizes before
        `axis`, and that of the sizes from `axis` on."""
        shape = local_shape(layout, self.mesh, rank)
        return int(np.prod(shape[:axis], dtype=int)), int(np.prod(shape[axis:], dtype=int))

    def _pieces(self, x: gs.Tensor, layouts: Sequence[Layout], axis: int) -> list[gs.Variable]:
        """Splits `x` along an axis into a piece for each layout, of as many elements as the rank's
        shard has."""

        def sizes(rank: int) -> Array:
            shapes = [layout.local_shape(self.mesh, rank) for layout in layouts]
            return np.array([np.prod(s, dtype=np.int64) for s in shapes])

        pieces = [self._fresh(t, f"piece{i}") for i, t in enumerate(self.inputs)]
        self._split(x, sizes, pieces, axis)
        return pieces

    def _split(
        self, x: gs.Tensor, sizes: Callable[[int], Array], results: Sequence[gs.Tensor], axis: int
    ) -> None:
        """Adds a Split of `x` into pieces of `sizes(rank)`, which become `results`."""
        name, operands = f"{self.node.name}::Split", [x, self._varying("sizes", sizes)]
        self.built.append(gs.Node("Split", name, {"axis": axis}, operands, list(results)))

    def _shaped(self, x: gs.Tensor, shape: Sequence[int], what: str) -> gs.Variable:
        """Returns `x` reshaped to a shape that is equal on all ranks. `what` is a part of the new
        tensors' names."""
        y = self._fresh(x, what)
        self._add("Reshape", [x, self._constant(f"{what}.shape", np.array(shape))], y)
        return y
