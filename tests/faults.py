"""Seeded compiler faults: each is a small change to the compiler that makes it wrong.

`FAULTS` maps a name to a function that applies the fault by monkeypatch. The suite must
notice every one; `test_faults.py` says by which cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from onnxpar import lower_reshard, pending, sharding, weights
from onnxpar.layout import Dim, Factor, nested_parts
from onnxpar.lower_reshard import ReshardBuilder
from onnxpar.mesh import Mesh
from onnxpar.passes import split_ranks
from onnxpar.passes.order_collectives import OrderCollectives
from onnxpar.pending import Pending
from onnxpar.rules import indexing, local
from onnxpar.runtime.parts import Parts
from onnxpar.sharding import Placement, Sharding

Patch = pytest.MonkeyPatch
FAULTS: dict[str, Callable[[Patch], None]] = {}


def fault(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    FAULTS[function.__name__.replace("_", " ")] = function
    return function


@fault
def a_bias_is_added_once_per_rank(patch: Patch) -> None:
    def need(self: Pending, op: Any, index: int) -> Placement:
        base = self.sharding.operand_placement(op, op.inputs[index])
        return Placement(base.leaves, *self.operands.get((op.node.name, index), ((), "sum")))

    patch.setattr(Pending, "need", need)


@fault
def a_partial_weight_is_not_blanked(patch: Patch) -> None:
    start = weights._Writer.__init__

    def init(self: Any, *args: Any) -> None:
        start(self, *args)
        self.fill = None

    patch.setattr(weights._Writer, "__init__", init)


@fault
def a_lookup_starts_one_row_late(patch: Patch) -> None:
    right = local.RankView.positions

    def positions(self: Any, factor: str) -> Any:
        return right(self, factor) + (factor == "v")

    patch.setattr(local.RankView, "positions", positions)


@fault
def rows_of_other_ranks_are_not_masked(patch: Patch) -> None:
    right = indexing._local_rows

    def rows(build: Any, count: int) -> Any:
        found, held = right(build, count)
        return found, build.add("Or", [held, build.add("Not", [held])])

    patch.setattr(indexing, "_local_rows", rows)


@fault
def a_reduction_is_dropped(patch: Patch) -> None:
    patch.setattr(ReshardBuilder, "_AllReduce", lambda self, x, y: self._add("Identity", [x], y))


@fault
def a_sum_becomes_a_maximum(patch: Patch) -> None:
    patch.setattr(
        ReshardBuilder,
        "_AllReduce",
        lambda self, x, y: self._collective("AllReduce", x, y, op="max"),
    )


@fault
def a_sum_becomes_a_mean(patch: Patch) -> None:
    def reduce(self: ReshardBuilder, x: gs.Tensor, y: gs.Tensor) -> None:
        total = self._fresh(y, "total")
        self._collective("AllReduce", x, total, op=self.before.reduce)
        share = np.array(1 / len(self.mesh.group(self.axes, 0)), np.float32)
        self._add("Mul", [total, self._constant("share", share)], y)

    patch.setattr(ReshardBuilder, "_AllReduce", reduce)


@fault
def a_group_is_in_the_wrong_order(patch: Patch) -> None:
    right = ReshardBuilder._collective

    def collective(self: ReshardBuilder, kind: str, x: Any, y: Any, **attrs: Any) -> None:
        right(self, kind, x, y, **attrs)
        backwards = lambda rank: list(self.mesh.group(self.axes, rank))[::-1]  # noqa: E731
        self.per_rank.attributes[self.node.name, "group"] = backwards

    patch.setattr(ReshardBuilder, "_collective", collective)


@fault
def a_group_spans_the_wrong_axis(patch: Patch) -> None:
    right = lower_reshard.ReshardBuilder.__post_init__

    def init(self: ReshardBuilder) -> None:
        right(self)
        last = self.mesh.shape[0][0]
        self.axes = (self.mesh.axis(last),)

    patch.setattr(ReshardBuilder, "__post_init__", init)


@fault
def every_rank_gets_the_first_slice(patch: Patch) -> None:
    patch.setattr(weights.WeightStore, "_first_holders", lambda self, layout: [0] * self.mesh.size)


@fault
def heads_are_cut_in_the_middle(patch: Patch) -> None:
    def size(dim: Dim, mesh: Mesh, rank: int) -> int:
        axes = tuple(a for leaf in local.leaves(dim) for a in leaf.axes)
        parts = nested_parts(dim.size, tuple(a.size for a in axes))
        return parts[mesh.coordinate(axes, rank)]

    patch.setattr(local, "local_size", size)


@fault
def a_local_slice_is_off_by_one(patch: Patch) -> None:
    right = lower_reshard.indices

    def shifted(dim: Dim, mesh: Mesh, rank: int) -> Any:
        at = right(dim, mesh, rank)
        split = isinstance(dim, Factor) and bool(dim.axes)
        return np.maximum(at - 1, 0) if split and rank else at

    patch.setattr(lower_reshard, "indices", shifted)


@fault
def an_exchange_cuts_the_wrong_dimension(patch: Patch) -> None:
    right = ReshardBuilder._collective

    def collective(self: ReshardBuilder, kind: str, x: Any, y: Any, **attrs: Any) -> None:
        if kind == "AllToAll":
            attrs["split_axis"], attrs["concat_axis"] = attrs["concat_axis"], attrs["split_axis"]
        right(self, kind, x, y, **attrs)

    patch.setattr(ReshardBuilder, "_collective", collective)


@fault
def a_gather_joins_the_wrong_dimension(patch: Patch) -> None:
    right = ReshardBuilder._collective

    def collective(self: ReshardBuilder, kind: str, x: Any, y: Any, **attrs: Any) -> None:
        if kind == "AllGather":
            attrs["axis"] = (attrs["axis"] + 1) % len(self.before.dims)
        right(self, kind, x, y, **attrs)

    patch.setattr(ReshardBuilder, "_collective", collective)


@fault
def uneven_parts_are_scattered_in_reverse(patch: Patch) -> None:
    right = ReshardBuilder._sizes

    def sizes(self: ReshardBuilder, dim: Dim) -> Any:
        given = right(self, dim)
        return lambda rank: given(rank)[::-1]

    patch.setattr(ReshardBuilder, "_sizes", sizes)


@fault
def what_counts_once_is_kept_on_every_rank(patch: Patch) -> None:
    patch.setattr(ReshardBuilder, "_Select", lambda self, x, y: self._add("Identity", [x], y))


@fault
def an_inner_factor_is_not_put_in_order(patch: Patch) -> None:
    patch.setattr(lower_reshard, "_is_run", lambda dim: True)


@fault
def a_pending_sum_passes_any_op(patch: Patch) -> None:
    patch.setattr(
        pending._Chooser,
        "_groups",
        lambda self, op: [(frozenset({i}), True) for i in range(len(op.node.inputs))],
    )


@fault
def a_whole_segment_is_counted_once_per_rank(patch: Patch) -> None:
    patch.setattr(Sharding, "legalize", lambda self, op: None)


@fault
def segments_are_thought_to_be_covered(patch: Patch) -> None:
    patch.setattr(
        sharding,
        "covered_axes",
        lambda dim: frozenset(a for f in local.leaves(dim) for a in f.axes),
    )


@fault
def collectives_are_not_chained(patch: Patch) -> None:
    patch.setattr(OrderCollectives, "run", lambda self, graph, ctx: False)


@fault
def every_rank_gets_the_shapes_of_the_first(patch: Patch) -> None:
    right = split_ranks._instantiate

    def instantiate(model: Any, ctx: Any, parts: Any, rank: int) -> None:
        constants = dict(ctx.per_rank.constants)
        ctx.per_rank.constants = {n: (lambda _, f=f: f(0)) for n, f in constants.items()}
        right(model, ctx, parts, rank)
        ctx.per_rank.constants = constants

    patch.setattr(split_ranks, "_instantiate", instantiate)


@fault
def a_rank_is_fed_its_neighbours_part(patch: Patch) -> None:
    right = Parts.take

    def take(self: Parts, whole: Any, rank: int) -> Any:
        return right(self, whole, (rank + 1) % self._mesh.size)

    patch.setattr(Parts, "take", take)
