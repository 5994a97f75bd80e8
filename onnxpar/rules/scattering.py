"""Rules of ops that write updates into a tensor along one dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import dtype_of, given, tensor_shape
from onnxpar.rules.indexing import SELECTED, local_rows, uncovered
from onnxpar.rules.movement import output_shape
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, invalid, names, rule

_ZERO, _ONE = np.array(0, np.int64), np.array(1, np.int64)
_MEETS = "several updates may hit one element, and the last one wins"
_JOINS = {"add": "sum", "max": "max", "min": "min"}
_PADDED = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "uint32", "bool")
"""Element types that onnxruntime's Pad takes."""


def meeting_updates(node: gs.Node, factors: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a rule for factors along which several updates may hit one element. If
    the op reduces updates by sum, max or min, a split gives a partial result (in a sum, only one
    rank adds the data); otherwise the factors stay whole, because the last update wins."""
    reduction = node.attrs.get("reduction", "none")
    if reduction not in _JOINS:
        reason = (
            _MEETS if reduction == "none" else "in a product, each shard would count the data once"
        )
        return {"whole": dict.fromkeys(factors, reason), "reduce": {}}
    return {
        "reduce": dict.fromkeys(factors, _JOINS[reduction]),
        "additive": frozenset({0}) if factors and reduction == "add" else frozenset(),
    }


def can_pad(data: gs.Tensor) -> bool:
    """True if onnxruntime's Pad supports the type of the data."""
    return str(dtype_of(data)) in _PADDED


def scatter_padded(
    build: Lowering,
    indices: gs.Tensor,
    axes: Sequence[int],
    counts: Callable[[Local], Sequence[int]],
) -> None:
    """Makes the result of a scatter in which each rank writes only the updates in its shard.
    Operand 0 gets one more element along `axes`, which takes the updates of other ranks, and is
    sliced off afterwards.

    indices  positions in the rank's shard; along `axes`, the indices of other ranks' updates equal
             `counts`
    counts   from a rank's view to the sizes of its shard along `axes`
    """
    node = build.local.node
    rank = len(tensor_shape(node.inputs[0]) or ())
    pads = np.array([*[0] * rank, *(int(i in axes) for i in range(rank))], np.int64)
    room = build.add("Pad", [build.input(0), pads])
    written = build.add(node.op, [room, indices, build.input(2)], **node.attrs)
    ends = build.per_rank(lambda local: np.array(counts(local), np.int64))
    build.finish(
        "Slice", [written, np.zeros(len(axes), np.int64), ends, np.array([*axes], np.int64)]
    )


@rule("ScatterElements")
def scatter_elements(node: gs.Node) -> Rule:
    """Sharding rule of ScatterElements: `v (d + r), i d, i d -> v (d + r)`, where r is not updated.
    If v is split, each rank skips the updates of other shards.

    If i is split and the op reduces updates by sum, max or min, the result is partial.
    """
    data, index = (tensor_shape(t) or () for t in node.inputs[:2])
    axis = node.attrs.get("axis", 0) % len(data)
    dims, at = names("d", len(data)), names("d", len(data))
    dims[axis], at[axis] = "v", "i"
    sizes = uncovered(dims, axis, data, index)
    rows = data[axis]
    fields = meeting_updates(node, ["i"])
    if rows is None or not can_pad(node.inputs[0]):
        fields["whole"] = {
            **fields.get("whole", {}),
            "v": "there is no room for the updates of other shards",
        }

    def lower(build: Lowering) -> None:
        indices, _ = local_rows(build, rows or 0, lambda local: local.size("v"))
        scatter_padded(build, indices, [axis], lambda local: [local.size("v")])

    table, part = dims_text(dims), dims_text(at)
    adds = node.attrs.get("reduction", "none") in ("none", "add")
    return einsum(
        node,
        f"{table}, {part}, {part} -> {table}",
        sizes=sizes,
        lowered=frozenset({"v"}),
        lower=lower,
        linear=(frozenset({0, 2}),) if adds else (),
        **fields,
    )


@rule("TensorScatter")
def tensor_scatter(node: gs.Node) -> Rule:
    """Sharding rule of TensorScatter: `b h s d, b h u d, b -> b h s d`: writes u updates into a
    cache from an index on; u must stay whole. If s is split, each rank writes the updates that fall
    into its shard."""
    shape, updates = (tensor_shape(t) or () for t in node.inputs[:2])
    axis = node.attrs.get("axis", -2) % len(shape)
    cache, update = names("d", len(shape)), names("d", len(shape))
    update[axis] = "u"
    factor, length, count = cache[axis], shape[axis], updates[axis]
    whole = {"u": "the write position is data-dependent"}
    if length is None or count is None or str(dtype_of(node.inputs[0])) not in SELECTED:
        whole[factor] = "the write position is data-dependent"
    is_circular = node.attrs.get("mode", "linear") == "circular"
    rest = ", d0" * (len(node.inputs) - 2)
    return einsum(
        node,
        f"{dims_text(cache)}, {dims_text(update)}{rest} -> {dims_text(cache)}",
        whole=whole,
        lowered=frozenset({factor}),
        lower=_Writes(factor, axis, len(shape), length or 0, count or 0, is_circular).lower,
        steps=1,
        contiguous=frozenset({factor}),
        nonempty=frozenset({factor}),
        linear=(frozenset({0, 1}),),
    )


@dataclass(frozen=True)
class _Writes:
    """Writes the updates of a TensorScatter that fall into the rank's shard of a cache.

    factor       the factor of the cache's positions
    axis, rank   their dimension, and the number of dimensions
    length       the global length of the cache
    count        the number of updates
    is_circular  True if updates continue from the end of the cache to its start

    Each rank makes one write for each update: to the update's place or, if that is on another rank,
    to the nearest place in the rank's shard. A write stores the update that belongs to its place
    or, if there is none, the old value. So several writes to one place store the same value.
    """

    factor: str
    axis: int
    rank: int
    length: int
    count: int
    is_circular: bool

    def lower(self, build: Lowering) -> None:
        """Adds the rank's nodes, and makes the cache with the updates the result."""
        first, last, rows = map(build.per_rank, (self._first, self._last, self._rows))
        place = self._beside(build, build.add("Range", [_ZERO, rows, _ONE]), self.axis)
        begin = None
        if given(build.local.node, 2) is not None:
            begin = self._beside(build, self._begin(build), 0)
            place = self._around(build, build.add("Add", [place, begin]))
        place = build.add("Min", [build.add("Max", [place, first]), last])
        row = place
        if begin is not None:
            row = self._around(build, build.add("Sub", [place, begin]))
        known = build.add("Clip", [row, _ZERO, np.array(self.count - 1, np.int64)])
        is_new = build.add("Equal", [known, row])
        wide = build.per_rank(self._written)
        known = build.add("Expand", [known, wide])
        place = build.add("Expand", [build.add("Sub", [place, first]), wide])
        new = build.add("GatherElements", [build.input(1), known], axis=self.axis)
        old = build.add("GatherElements", [build.input(0), place], axis=self.axis)
        written = build.add("Where", [is_new, new, old])
        build.finish("ScatterElements", [build.input(0), place, written], axis=self.axis)

    def _begin(self, build: Lowering) -> gs.Tensor:
        """Returns the place of the first update of each sample. Like onnxruntime's kernel, the run
        fails (by a Gather out of range) if an update would be outside the cache."""
        begin = build.input(2)
        if self.is_circular:
            return begin
        shape = build.add("Shape", [build.input(1)])
        count = build.add("Gather", [shape, np.array(self.axis, np.int64)])
        end = build.add("Add", [begin, count])
        is_late = build.add("Greater", [end, np.array(self.length, np.int64)])
        is_outside = build.add("Or", [build.add("Less", [begin, _ZERO]), is_late])
        at = build.add("Cast", [is_outside], to=onnx.TensorProto.INT64)  # 1 is out of range
        return build.add("Add", [begin, build.add("Gather", [_ZERO.reshape(1), at])])

    def _beside(self, build: Lowering, vector: gs.Tensor, axis: int) -> gs.Tensor:
        """Turns a vector into dimension `axis` of a tensor; all other dimensions have size 1."""
        others = [i for i in range(self.rank) if i != axis]
        return build.add("Unsqueeze", [vector], axes=others)

    def _around(self, build: Lowering, at: gs.Tensor) -> gs.Tensor:
        """Wraps places beyond the end of a circular cache around to its start; unchanged if the
        cache is not circular."""
        if not self.is_circular:
            return at
        return build.add("Mod", [at, np.array(self.length, np.int64)])

    def _first(self, local: Local) -> Any:
        """The first place in the rank's shard."""
        return np.array(local.interval(self.factor)[0], np.int64)

    def _last(self, local: Local) -> Any:
        """The last place in the rank's shard."""
        return np.array(local.interval(self.factor)[1] - 1, np.int64)

    def _rows(self, local: Local) -> Any:
        """The number of writes."""
        return np.array(self.count, np.int64)

    def _written(self, local: Local) -> Any:
        """The shape of the rank's shard, with the number of writes in place of its number of
        places."""
        shape = output_shape(local)
        shape[self.axis] = self._rows(local)
        return shape


@rule("ReverseSequence")
def reverse_sequence(node: gs.Node) -> Rule:
    """Sharding rule of ReverseSequence: `t b d, b -> t b d`; the steps t must stay whole."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    axes = node.attrs.get("time_axis", 0), node.attrs.get("batch_axis", 1)
    if sorted(axes) != [0, 1]:
        raise invalid(node, f"time_axis={axes[0]} and batch_axis={axes[1]}, not 0 and 1")
    time, batch = dims[axes[0]], dims[axes[1]]
    text = dims_text(dims)
    return einsum(
        node,
        f"{text}, {batch} -> {text}",
        whole={time: "it is reversed"},
        linear=(frozenset({0}),),
        monotone=frozenset({0}),
    )
