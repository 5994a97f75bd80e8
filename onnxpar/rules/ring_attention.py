"""Attention over shards of the queries, to which the shards of keys and values travel in a ring.

Each rank attends with its own queries to one shard of keys after the other, and keeps for each
query the largest score, the sum of exponentials, and the weighted sum of values so far (Liu et
al., "Ring Attention with Blockwise Transformers", 2023). So no rank holds all keys, or all scores
of a query. Keys that no query of a rank sees are skipped. In causal attention, each rank computes
for an early and a late part of the sequence, so that all have the same work (zigzag).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.ir.tensors import given
from onnxpar.rules.attention_lowering import (
    LENGTHS,
    AttentionLowering,
    least_of,
    sees_by_place,
)
from onnxpar.rules.communicate import (
    finish,
    has_output,
    held_positions,
    is_short_float,
    like,
    widen,
)
from onnxpar.rules.ring_ranges import Bounds, Range, seen_range, zigzag
from onnxpar.rules.rule import Local, Lowering

Array = np.ndarray[Any, Any]


class RingAttention(AttentionLowering):
    """Lowers an Attention node, by a ring if queries and keys are split over the same axes."""

    def lower(self, build: Lowering) -> None:
        """Replaces the node on a rank that holds shards of the queries, the keys or both."""
        if build.shares_axes("s", "t"):
            _Ring(self, build).lower()
        else:
            super().lower(build)


@dataclass
class _State:
    """For each query: the largest score, the sum of exponentials, the weighted sum of values."""

    largest: gs.Tensor
    total: gs.Tensor
    values: gs.Tensor


class _Ring:
    """Builds the nodes of one Attention; `queries` and `keys` are the positions that each rank of
    the ring has, None if the length is open."""

    def __init__(self, op: AttentionLowering, build: Lowering) -> None:
        self.op = op
        self.build = build
        self.least = least_of(build.local.node.inputs[0])
        self.queries: list[Array] | None = None
        self.keys: list[Array] | None = None
        if not (build.is_open("s") or build.is_open("t")):
            self.queries = build.of_members("s", lambda local: local.positions("s"))
            self.keys = build.of_members("t", lambda local: local.positions("t"))
        self.count = len(build.of_members("t", lambda local: 0))
        self.has_lengths = given(build.local.node, LENGTHS) is not None

    def lower(self) -> None:
        """Replaces the node."""
        build, op = self.build, self.op
        query = build.add("Mul", [op.by_head(build, 0), like_head(build, op.scale)])
        pair = build.add("Concat", [op.cut_heads(build, 1), op.cut_heads(build, 2)], axis=3)
        travels = {"pair": pair}
        back = self._balanced(travels, query)
        if back is not None:
            query, held = back
        if self.keys is None and self._needs_places:
            travels["columns"] = held_positions(build, "t")
        state: _State | None = None
        for step in range(self.count):
            state = self._attend(step, query, travels, state)
            if step + 1 < self.count:
                travels = {name: self._shift(name, x, step) for name, x in travels.items()}
        assert state is not None
        result = self._result(state)
        if back is not None:
            assert self.queries is not None
            result = build.exchange(result, "s", 2, self.queries, held)
        self._finish(result)

    @property
    def _needs_places(self) -> bool:
        return sees_by_place(self.op.attrs) or self.has_lengths

    def _balanced(
        self, travels: dict[str, gs.Tensor], query: gs.Tensor
    ) -> tuple[gs.Tensor, list[Array]] | None:
        """Places the sequence in zigzag for causal attention: rank i has parts i and 2n-1-i of 2n.
        Returns the queries, and the positions that ranks had before; None if it stays as it is."""
        before, keys = self.queries, self.keys
        if before is None or keys is None or not self.op.attrs.get("is_causal"):
            return None
        size = sum(map(len, before))
        every = np.arange(size)
        if self.has_lengths or size < 2 * self.count or sum(map(len, keys)) != size:
            return None
        if any(not np.array_equal(np.sort(np.concatenate(x)), every) for x in (before, keys)):
            return None
        placed = zigzag(size, self.count)
        for name, x in travels.items():
            axis = self._axis(name)
            travels[name] = self.build.exchange(x, "t", axis, keys, placed)
        self.queries = self.keys = placed
        return self.build.exchange(query, "s", 2, before, placed), before

    def _axis(self, name: str) -> int:
        """The dimension of the keys."""
        return 2 if name == "pair" else 0

    def _shift(self, name: str, x: gs.Tensor, step: int) -> gs.Tensor:
        if self.keys is None:
            sizes = self.build.of_members("t", lambda local: local.size("t"))
        else:
            sizes = [len(positions) for positions in self.keys]
        held = [sizes[(i - step) % self.count] for i in range(self.count)]
        return self.build.shift(x, "t", self._axis(name), held)

    def _attend(
        self, step: int, query: gs.Tensor, travels: dict[str, gs.Tensor], state: _State | None
    ) -> _State:
        """The state after the queries have attended to the keys that a rank has at a step."""
        build, op = self.build, self.op
        ranges = self._ranges(step)
        rows, columns = self._cuts(ranges)
        pair = self._cut(travels["pair"], columns, 2)
        widths = [build.local.size("d"), build.local.size("e")]
        key, value = build.add_each("Split", [pair], 2, axis=3, split=widths)
        key = build.add("Transpose", [widen(build, key)], perm=[0, 1, 3, 2])
        mine = self._grouped(self._cut(query, rows, 2), rows)
        scores = self._by_head(build.add("MatMul", [mine, key]), rows)
        scores = op.capped(build, scores)
        scores = self._masked(scores, step, travels, ranges)
        largest = build.add("ReduceMax", [scores], axes=[3], keepdims=1)
        largest = build.add("Max", [largest, like(scores, self.least)])
        old = None if state is None else self._part(state, rows)
        if old is not None:
            largest = build.add("Max", [largest, old.largest])
        powers = build.add("Exp", [build.add("Sub", [scores, largest])])
        sees = build.add("Greater", [largest, like(scores, self.least)])
        powers = build.add("Where", [sees, powers, like(scores, 0)])
        total = build.add("ReduceSum", [powers], axes=[3], keepdims=1)
        value = widen(build, value)
        values = self._by_head(build.add("MatMul", [self._grouped(powers, rows), value]), rows)
        if state is None or old is None:
            return _State(largest, total, values)
        share = build.add("Exp", [build.add("Sub", [old.largest, largest])])
        total = build.add("Add", [build.add("Mul", [old.total, share]), total])
        values = build.add("Add", [build.add("Mul", [old.values, share]), values])
        return self._joined(state, _State(largest, total, values), rows)

    def _ranges(self, step: int) -> list[Range] | None:
        """What each rank computes at a step; None if that depends on the run."""
        if self.queries is None or self.keys is None or self.has_lengths:
            return None
        return [
            seen_range(
                self.op.attrs, self.queries[i], self.keys[(i - step) % self.count], step == 0
            )
            for i in range(self.count)
        ]

    def _cuts(self, ranges: list[Range] | None) -> tuple[list[Bounds] | None, list[Bounds] | None]:
        """The bounds of the queries and of the keys that take part, for each rank; None if all do
        on all ranks."""
        if ranges is None or self.queries is None or self.keys is None or not self._needs_places:
            return None, None
        rows, columns = [r.queries for r in ranges], [r.keys for r in ranges]
        sizes = {len(k) for k in self.keys}
        all_rows = all(r == (0, len(q)) for r, q in zip(rows, self.queries, strict=True))
        all_columns = len(sizes) == 1 and all(c == (0, *sizes) for c in columns)
        return (None if all_rows else rows), (None if all_columns else columns)

    def _cut(self, x: gs.Tensor, bounds: list[Bounds] | None, axis: int) -> gs.Tensor:
        """The elements within the bounds of each rank."""
        if bounds is None:
            return x
        ends = [self._of_rank([np.array([b[i]], np.int64) for b in bounds]) for i in (0, 1)]
        return self.build.add("Slice", [x, *ends, np.array([axis], np.int64)])

    def _of_rank(self, values: list[Array]) -> gs.Tensor:
        """A constant with another value for each rank of the ring."""
        return self.build.per_rank(lambda local: values[local.member("s")])

    def _rows(self, rows: list[Bounds] | None) -> Callable[[Local], int]:
        """The number of queries of a rank that take part."""
        if rows is not None:
            return lambda local: rows[local.member("s")][1] - rows[local.member("s")][0]
        queries = self.queries
        if queries is None:
            return lambda local: local.size("s")
        if len({len(q) for q in queries}) == 1:
            return lambda local: len(queries[0])
        return lambda local: len(queries[local.member("s")])

    def _grouped(self, x: gs.Tensor, rows: list[Bounds] | None) -> gs.Tensor:
        """`x`, (batch, heads, rows, width), with the rows of all query heads that share a key head
        concatenated."""
        size = self._rows(rows)

        def shape(local: Local) -> Array:
            return np.array([0, local.size("k"), local.size("g") * size(local), 0], np.int64)

        return self.build.add("Reshape", [x, self.build.per_rank(shape)])

    def _by_head(self, x: gs.Tensor, rows: list[Bounds] | None) -> gs.Tensor:
        """The inverse of `_grouped`."""
        size = self._rows(rows)

        def shape(local: Local) -> Array:
            return np.array([0, local.size("k") * local.size("g"), size(local), 0], np.int64)

        return self.build.add("Reshape", [x, self.build.per_rank(shape)])

    def _masked(
        self,
        scores: gs.Tensor,
        step: int,
        travels: dict[str, gs.Tensor],
        ranges: list[Range] | None,
    ) -> gs.Tensor:
        """The scores with the least number where a query does not see a key."""
        build = self.build
        if not self._needs_places or (ranges is not None and all(r.is_full for r in ranges)):
            return scores
        rows, columns = self._places(step, travels, ranges)
        visible = self.op.visible(build, rows, columns, None)
        return build.add("Where", [visible, scores, like(scores, self.least)])

    def _places(
        self, step: int, travels: dict[str, gs.Tensor], ranges: list[Range] | None
    ) -> tuple[gs.Tensor, gs.Tensor]:
        """The positions of the queries (a column) and of the keys that take part."""
        if self.queries is None or self.keys is None:
            return held_positions(self.build, "s", 0, 2), travels["columns"]
        rows, columns = [], []
        for i in range(self.count):
            queries, keys = self.queries[i], self.keys[(i - step) % self.count]
            if ranges is not None:
                queries, keys = queries[slice(*ranges[i].queries)], keys[slice(*ranges[i].keys)]
            rows.append(queries[:, None].astype(np.int64))
            columns.append(keys.astype(np.int64))
        return self._of_rank(rows), self._of_rank(columns)

    def _part(self, state: _State, rows: list[Bounds] | None) -> _State:
        return _State(*(self._cut(x, rows, 2) for x in (state.largest, state.total, state.values)))

    def _joined(self, old: _State, new: _State, rows: list[Bounds] | None) -> _State:
        """The new state of the queries that took part, and the old one of the others."""
        if rows is None:
            return new
        assert self.queries is not None
        before = [(0, start) for start, _ in rows]
        after = [(end, len(q)) for (_, end), q in zip(rows, self.queries, strict=True)]
        found = []
        for name in ("largest", "total", "values"):
            x, y = getattr(old, name), getattr(new, name)
            pieces = [self._cut(x, before, 2), y, self._cut(x, after, 2)]
            found.append(self.build.add("Concat", pieces, axis=2))
        return _State(*found)

    def _result(self, state: _State) -> gs.Tensor:
        """The weighted mean of the values; zero for a query that sees no key."""
        build = self.build
        is_zero = build.add("Equal", [state.total, like(state.total, 0)])
        total = build.add("Where", [is_zero, like(state.total, 1), state.total])
        return build.add("Div", [state.values, total])

    def _finish(self, result: gs.Tensor) -> None:
        build, op = self.build, self.op
        if op.flat:
            result = build.add("Transpose", [result], perm=[0, 2, 1, 3])
            finish(build, "Reshape", [result, np.array([0, 0, -1], np.int64)])
        else:
            finish(build, "Identity", [result])
        for i in (1, 2):
            if has_output(build, i):
                build.finish("Identity", [op.cut_heads(build, i)], i)


def like_head(build: Lowering, value: float) -> Array:
    """A number of the type in which scores are computed."""
    query = build.local.node.inputs[0]
    return np.array(value, np.float32) if is_short_float(query) else like(query, value)
