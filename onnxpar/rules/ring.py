"""Ring attention, the parts that its forward pass and its gradient share: each rank keeps its
queries, and the shards of keys and values travel from rank to rank.

If queries and keys are not split over the same axes, there is no ring: in a single step, a rank
computes with the keys that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import dtype_of, given, tensor_shape
from onnxpar.rules.attention_lowering import (
    LENGTHS,
    MASK,
    AttentionLowering,
    hidden,
    least_of,
    masked,
    sees_by_place,
)
from onnxpar.rules.communicate import held_positions, is_short_float, like
from onnxpar.rules.ring_ranges import Bounds, Range, seen_range, zigzag
from onnxpar.rules.rule import Local, Lowering

Array = np.ndarray[Any, Any]
_KEYS_AXIS = {"columns": 0}
"""The dimension of keys in travelling tensors, by name, if it is not dimension 2."""


class Ring:
    """Builds the nodes that replace one node with queries and keys. Queries stay on their ranks;
    shards of keys and values travel from rank to rank.

    queries, keys  the global positions on each rank of the ring; None if the length is open or
                   there is no ring
    held           the positions (of queries, of keys) on each rank before the sequence was put in
                   zigzag order; None if it was not
    reads_lengths  True if the node has the operands of ONNX's Attention, among them the number of
                   keys of each sample
    """

    reads_lengths = True

    def __init__(self, op: AttentionLowering, build: Lowering) -> None:
        self.op = op
        self.build = build
        node = build.local.node
        self.least = least_of(node.inputs[0])
        self.is_ring = build.shares_axes("s", "t")
        self.count = len(build.of_members("t", lambda local: 0)) if self.is_ring else 1
        self.queries: list[Array] | None = None
        self.keys: list[Array] | None = None
        self.held: tuple[list[Array], list[Array]] | None = None
        if self.is_ring and not (build.is_open("s") or build.is_open("t")):
            self.queries = build.of_members("s", lambda local: local.positions("s"))
            self.keys = build.of_members("t", lambda local: local.positions("t"))
        self.masks_of = [i for i in self.mask_operands() if given(node, i) is not None]
        self.mask_shapes = {i: tensor_shape(node.inputs[i]) or () for i in self.masks_of}
        self.has_lengths = self.reads_lengths and given(node, LENGTHS) is not None

    def mask_operands(self) -> list[int]:
        """Returns the indices of operands that may be masks: with a row for each query, a column
        for each key, or both."""
        return [MASK]

    @property
    def needs_places(self) -> bool:
        """True if a query sees only keys at certain positions: under causality, a window or
        lengths."""
        return sees_by_place(self.op.attrs) or self.has_lengths

    def places(self) -> bool:
        """Chooses zigzag order for causal attention, so that all ranks have equal work: rank i gets
        parts i and 2n-1-i of 2n. Returns True if it did; False if the sequence stays as it is."""
        before, keys = self.queries, self.keys
        if before is None or keys is None or not self.op.attrs.get("is_causal"):
            return False
        size = sum(map(len, before))
        if self.has_lengths or size < 2 * self.count or sum(map(len, keys)) != size:
            return False
        every = np.arange(size)
        if any(not np.array_equal(np.sort(np.concatenate(x)), every) for x in (before, keys)):
            return False
        if any(len(shape) > 1 and shape[-2] != 1 for shape in self.mask_shapes.values()):
            return False  # a mask has too many rows to move
        self.held = before, keys
        self.queries = self.keys = zigzag(size, self.count)
        return True

    def placed(self, x: gs.Tensor, factor: str) -> gs.Tensor:
        """Returns `x`, queries (`factor` "s") or keys (`factor` "t") along dimension 2, in zigzag
        order, exchanged between ranks; unchanged if `places` chose no zigzag."""
        if self.held is None or self.queries is None:
            return x
        return self.build.exchange(x, factor, 2, self.held["st".index(factor)], self.queries)

    def restored(self, x: gs.Tensor, factor: str) -> gs.Tensor:
        """The inverse of `placed`: exchanges rows back to the ranks that had them before."""
        if self.held is None or self.queries is None:
            return x
        return self.build.exchange(x, factor, 2, self.queries, self.held["st".index(factor)])

    def blocks(self, travels: dict[str, gs.Tensor]) -> Iterator[Block]:
        """Yields the blocks of queries and keys that ranks compute, one for each step of the ring.
        Between steps, all tensors in `travels` (by name) move on to the next rank, and the dict
        gets the tensors that arrive."""
        if self.is_ring and self.keys is None and (self.needs_places or self.masks_of):
            travels["columns"] = held_positions(self.build, "t")
        for step in range(self.count):
            yield Block(self, step, self._ranges(step), travels.get("columns"))
            if step + 1 < self.count:
                for name, x in travels.items():
                    travels[name] = self.shift(x, step, _KEYS_AXIS.get(name, 2))

    def shift(self, x: gs.Tensor, step: int, axis: int = 2) -> gs.Tensor:
        """Sends `x` to the next rank; returns the tensor that arrives. `x` belongs to the keys that
        a rank has at `step`; `axis` is the dimension of the keys."""
        if self.keys is None:
            sizes = self.build.of_members("t", lambda local: local.size("t"))
        else:
            sizes = [len(positions) for positions in self.keys]
        held = [sizes[(i - step) % self.count] for i in range(self.count)]
        return self.build.shift(x, "t", axis, held)

    def _ranges(self, step: int) -> list[Range] | None:
        """Returns, for each rank, the range of queries and keys that it computes at a step; None if
        the ranges depend on the run."""
        if self.queries is None or self.keys is None or self.has_lengths:
            return None
        return [
            seen_range(
                self.op.attrs, self.queries[i], self.keys[(i - step) % self.count], step == 0
            )
            for i in range(self.count)
        ]

    def fresh(self, step: int) -> list[Array] | None:
        """Returns, for each rank, the indices of the keys at a step that the rank has not had at
        earlier steps; None if shards of keys do not overlap, so that all are new."""
        keys, n = self.keys, self.count
        if keys is None or sum(map(len, keys)) == len(np.unique(np.concatenate(keys))):
            return None
        indices = []
        for i in range(n):
            before = [keys[(i - earlier) % n] for earlier in range(step)]
            is_new = ~np.isin(keys[(i - step) % n], np.concatenate([*before, keys[i][:0]]))
            indices.append(np.flatnonzero(is_new))
        return indices

    def of_rank(self, values: list[Array]) -> gs.Tensor:
        """Returns a constant that has `values[i]` on rank i of the ring."""
        return self.build.per_rank(lambda local: values[local.member("s")])

    def split(self, x: gs.Tensor, widths: list[int]) -> list[gs.Variable]:
        """Cuts dimension 3 of `x` into parts of these widths."""
        return self.build.add_each("Split", [x], len(widths), axis=3, split=widths)


@dataclass
class Block:
    """The queries of a rank, and the keys that it has at one step of the ring.

    ranges  for each rank, the queries and keys that take part: the others see no key, or are seen
            by no query; None if the ranges depend on the run
    places  a tensor of the keys' positions; None if the compiler knows them
    """

    ring: Ring
    step: int
    ranges: list[Range] | None
    places: gs.Tensor | None

    @cached_property
    def rows(self) -> list[Bounds] | None:
        """For each rank, the bounds of the queries that take part; None if all of them do on all
        ranks."""
        queries = self.ring.queries
        if self.ranges is None or queries is None or not self.ring.needs_places:
            return None
        rows = [r.queries for r in self.ranges]
        all_do = all(r == (0, len(q)) for r, q in zip(rows, queries, strict=True))
        return None if all_do else rows

    @cached_property
    def columns(self) -> list[Bounds] | None:
        """For each rank, the bounds of the keys that take part; None if all of them do on all
        ranks."""
        keys = self.ring.keys
        if self.ranges is None or keys is None or not self.ring.needs_places:
            return None
        columns, sizes = [r.keys for r in self.ranges], {len(k) for k in keys}
        all_do = len(sizes) == 1 and all(c == (0, *sizes) for c in columns)
        return None if all_do else columns

    def cut_rows(self, x: gs.Tensor, axis: int = 2) -> gs.Tensor:
        """Returns the rows of `x` for the queries that take part; `axis` is their dimension."""
        return self._cut(x, self.rows, axis)

    def cut_columns(self, x: gs.Tensor) -> gs.Tensor:
        """Returns the part of `x` for the keys that take part, along dimension 2."""
        if self.fresh is not None:
            at = self.ring.of_rank([index.astype(np.int64) for index in self.fresh])
            return self.ring.build.add("Gather", [x, at], axis=2)
        return self._cut(x, self.columns, 2)

    @cached_property
    def fresh(self) -> list[Array] | None:
        """For each rank, the indices of keys that the rank has not had at earlier steps; None if
        all are new."""
        fresh = self.ring.fresh(self.step)
        assert fresh is None or self.columns is None, "keys that overlap are not cut by position"
        return fresh

    def _cut(self, x: gs.Tensor, bounds: list[Bounds] | None, axis: int) -> gs.Tensor:
        """Slices `x` along `axis` by the bounds of each rank; unchanged if `bounds` is None."""
        if bounds is None:
            return x
        of_rank = self.ring.of_rank
        ends = [of_rank([np.array([b[i]], np.int64) for b in bounds]) for i in (0, 1)]
        return self.ring.build.add("Slice", [x, *ends, np.array([axis], np.int64)])

    def joined_rows(self, old: gs.Tensor, new: gs.Tensor) -> gs.Tensor:
        """Returns `old` with the rows of the queries that took part replaced by `new`."""
        queries = self.ring.queries
        return self._joined(old, new, self.rows, [len(q) for q in queries or ()])

    def joined_columns(self, old: gs.Tensor, new: gs.Tensor) -> gs.Tensor:
        """Returns `old` with the rows of the keys that took part replaced by `new`."""
        keys, count = self.ring.keys or [], self.ring.count
        sizes = [len(keys[(i - self.step) % count]) for i in range(len(keys))]
        return self._joined(old, new, self.columns, sizes)

    def _joined(
        self, old: gs.Tensor, new: gs.Tensor, bounds: list[Bounds] | None, sizes: list[int]
    ) -> gs.Tensor:
        """Returns `old` with the range `bounds` of dimension 2 replaced by `new`. `sizes` are the
        sizes of `old`, by rank."""
        if bounds is None:
            return new
        before = [(0, start) for start, _ in bounds]
        after = [(end, size) for (_, end), size in zip(bounds, sizes, strict=True)]
        pieces = [self._cut(old, before, 2), new, self._cut(old, after, 2)]
        return self.ring.build.add("Concat", pieces, axis=2)

    def grouped(self, x: gs.Tensor) -> gs.Tensor:
        """Reshapes `x`, (batch, heads, rows, width), to (batch, key heads, group x rows, width):
        the rows of all query heads that share a key head, one head after the other."""
        size = self._row_count()

        def shape(local: Local) -> Array:
            return np.array([0, local.size("k"), local.size("g") * size(local), 0], np.int64)

        return self.ring.build.add("Reshape", [x, self.ring.build.per_rank(shape)])

    def by_head(self, x: gs.Tensor) -> gs.Tensor:
        """Reshapes a result of `grouped` back to (batch, heads, rows, width)."""
        size = self._row_count()

        def shape(local: Local) -> Array:
            return np.array([0, local.size("k") * local.size("g"), size(local), 0], np.int64)

        return self.ring.build.add("Reshape", [x, self.ring.build.per_rank(shape)])

    def _row_count(self) -> Callable[[Local], int]:
        """Returns a function from a rank's view to the number of its queries that take part."""
        rows, queries = self.rows, self.ring.queries
        if rows is not None:
            return lambda local: rows[local.member("s")][1] - rows[local.member("s")][0]
        if queries is None:
            return lambda local: local.size("s")
        if len({len(q) for q in queries}) == 1:
            return lambda local: len(queries[0])
        return lambda local: len(queries[local.member("s")])

    def masked(self, scores: gs.Tensor) -> gs.Tensor:
        """Returns the scores after the masks: sums with a mask of numbers, and the least number
        (or minus infinity) for keys that a query does not see."""
        ring, build = self.ring, self.ring.build
        mask = self.mask(MASK) if MASK in ring.masks_of else None
        is_bool = mask is not None and dtype_of(mask) == np.bool_
        if mask is not None and not is_bool:
            scores = masked(build, scores, mask)
        sees_all = self.ranges is not None and all(r.is_full for r in self.ranges)
        rows, columns = (None, None)
        if ring.needs_places and not sees_all:
            rows, columns = self._row_positions(), self._column_positions()
        visible = ring.op.visible(build, rows, columns, mask if is_bool else None)
        if visible is None:
            return scores
        return build.add("Where", [visible, scores, like(scores, hidden(build, ring.least))])

    def mask(self, operand: int) -> gs.Tensor:
        """Returns the part of a mask operand for the queries and keys that take part."""
        ring, shape = self.ring, self.ring.mask_shapes[operand]
        x = ring.build.input(operand)
        if len(shape) > 1 and shape[-2] != 1:
            x = self.cut_rows(x, len(shape) - 2)
        if shape and shape[-1] != 1 and ring.build.local.is_split("t"):
            x = ring.build.add("Gather", [x, self._column_positions()], axis=len(shape) - 1)
        return x

    def _row_positions(self) -> gs.Tensor:
        """Returns the global positions of the queries that take part, as a column."""
        queries = self.ring.queries
        if queries is None:
            return held_positions(self.ring.build, "s", 0, 2)
        bounds = self.rows or [(0, len(q)) for q in queries]
        positions = [q[slice(*b)] for q, b in zip(queries, bounds, strict=True)]
        return self.ring.of_rank([q[:, None].astype(np.int64) for q in positions])

    def _column_positions(self) -> gs.Tensor:
        """Returns the global positions of the keys that take part."""
        keys, count = self.ring.keys, self.ring.count
        if keys is None:
            return self.places if self.places is not None else held_positions(self.ring.build, "t")
        positions = [keys[(i - self.step) % count] for i in range(count)]
        if self.fresh is not None:
            positions = [k[index] for k, index in zip(positions, self.fresh, strict=True)]
        if self.columns is not None:
            positions = [k[slice(*b)] for k, b in zip(positions, self.columns, strict=True)]
        return self.ring.of_rank([k.astype(np.int64) for k in positions])


def like_head(build: Lowering, value: float) -> Array:
    """Returns a constant in the type in which scores are computed: float32 for queries of 16-bit
    floats, otherwise the type of the queries."""
    query = build.local.node.inputs[0]
    return np.array(value, np.float32) if is_short_float(query) else like(query, value)
