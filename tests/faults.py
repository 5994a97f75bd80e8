"""Faults that a sharding compiler may have: each a small change of the compiler, and a model that
must notice it by a wrong result, a broken invariant or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from onnxpar.compiler.pass_ import PassContext
from onnxpar.graph.tensors import numpy_dtype
from onnxpar.layout import layout
from onnxpar.layout.layout import Factor, Layout, dim_axes
from onnxpar.layout.mesh import Mesh
from onnxpar.lowering import rank_view as local
from onnxpar.lowering import weights
from onnxpar.lowering.lower_reshard import ReshardBuilder
from onnxpar.lowering.weights import WeightStore
from onnxpar.passes.lower.insert_collectives import _Insertion
from onnxpar.passes.lower.order_collectives import OrderCollectives
from onnxpar.rules import indexing, reductions
from onnxpar.rules.rule import Rule, registered
from onnxpar.sharding.partial_sums import PartialSums
from onnxpar.sharding.state import FactorSharding, ShardingState

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """`plant` breaks the compiler; the small models of these names must notice."""

    plant: Callable[[Patch], None]
    models: tuple[str, ...]


FAULTS: dict[str, Fault] = {}


def fault(*models: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Registers a fault by the name of its function."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS[plant.__name__] = Fault(plant, models)
        return plant

    return register


def change_collective(
    patch: Patch, kind: str, change: Callable[[ReshardBuilder, dict[str, Any]], None]
) -> None:
    """Changes the attributes of every collective of a kind as it is built."""
    build = ReshardBuilder._collective

    def changed(self: ReshardBuilder, k: str, x: gs.Tensor, y: gs.Tensor, **attrs: Any) -> None:
        if k == kind:
            change(self, attrs)
        build(self, k, x, y, **attrs)

    patch.setattr(ReshardBuilder, "_collective", changed)


def change_rule(patch: Patch, op: str, change: Callable[[gs.Node, Rule], Rule]) -> None:
    """Changes the rule of an op."""
    rule = registered()["", op]
    patch.setitem(registered(), ("", op), lambda node: change(node, rule(node)))  # type: ignore[arg-type]


@fault("mlp")
def bias_added_twice(patch: Patch) -> None:
    def required(self: PartialSums, op: Any, index: int) -> FactorSharding:
        return self.sharding.operand_sharding(op, op.inputs[index])

    patch.setattr(PartialSums, "required", required)


@fault("mlp")
def rule_forgets_that_the_bias_is_added_once(patch: Patch) -> None:
    change_rule(patch, "Gemm", lambda node, rule: replace(rule, additive=frozenset()))


@fault("table")
def wrong_offset_of_a_table(patch: Patch) -> None:
    interval = local.RankView.interval

    def off_by_one(self: local.RankView, factor: str) -> tuple[int, int]:
        more = factor == "v" and self._rank > 0
        start, end = interval(self, factor)
        return start + more, end + more

    patch.setattr(local.RankView, "interval", off_by_one)


@fault("table")
def rows_held_elsewhere_are_not_zeroed(patch: Patch) -> None:
    def unmasked(build: Any, row: gs.Tensor, count: Any) -> gs.Tensor:
        above = build.add("Greater", [row, np.array(-100, np.int64)])
        return build.add("And", [above, build.add("Less", [row, count])])

    patch.setattr(indexing, "_between", unmasked)


@fault("gate", "mlp")
def dropped_reduction(patch: Patch) -> None:
    def identity(self: ReshardBuilder, x: gs.Tensor, y: gs.Tensor) -> None:
        self._add("Identity", [x], y)

    patch.setattr(ReshardBuilder, "_AllReduce", identity)


@fault("gate")
def maximum_for_a_sum(patch: Patch) -> None:
    change_collective(patch, "AllReduce", lambda _, attrs: attrs.update(op="max"))


@fault("peak")
def sum_for_a_maximum(patch: Patch) -> None:
    change_collective(patch, "AllReduce", lambda _, attrs: attrs.update(op="sum"))


@fault("gate")
def mean_for_a_sum(patch: Patch) -> None:
    def mean(self: ReshardBuilder, x: gs.Tensor, y: gs.Tensor) -> None:
        total = self._fresh(x, "total")
        self._collective("AllReduce", x, total, op=self.before.reduce)
        ranks = np.array(len(self.mesh.group(self.axes, 0)), numpy_dtype(x))
        self._add("Div", [total, self._constant("ranks", ranks)], y)

    patch.setattr(ReshardBuilder, "_AllReduce", mean)


@fault("residual", "scatter")
def group_across_the_other_axis(patch: Patch) -> None:
    def other(self: ReshardBuilder, attrs: dict[str, Any]) -> None:
        names = {a.name for a in self.axes}
        axes = [self.mesh.axis(n) for n, _ in self.mesh.shape if n not in names]
        attrs["group"] = lambda rank: list(self.mesh.group(axes, rank))

    build = ReshardBuilder._collective

    def changed(self: ReshardBuilder, k: str, x: gs.Tensor, y: gs.Tensor, **attrs: Any) -> None:
        build(self, k, x, y, **attrs)
        wrong: dict[str, Any] = {}
        other(self, wrong)
        self.per_rank.attributes[self.node.name, "group"] = wrong["group"]

    patch.setattr(ReshardBuilder, "_collective", changed)


@fault("heads")
def stale_slice_of_another_weight(patch: Patch) -> None:
    cut, made = WeightStore.cut, dict[Any, Any]()

    def stale(self: WeightStore, name: str, weight: Any, how: Layout, *more: Any) -> list[Any]:
        key = (tuple(weight.dims), how)
        made.setdefault(key, cut(self, name, weight, how, *more))
        parts = [type(p).FromString(p.SerializeToString()) for p in made[key]]
        for part in parts:
            part.name = name
        return parts

    patch.setattr(WeightStore, "cut", stale)


@fault("heads")
def heads_cut_in_the_middle(patch: Patch) -> None:
    """A split of merged factors is taken for a split of the dimension that they make up."""
    placed = ShardingState.layout

    def flat(self: ShardingState, tensor: Any, factor_sharding: FactorSharding) -> Layout:
        how = placed(self, tensor, factor_sharding)
        dims = tuple(Factor(d.size, dim_axes(d)) for d in how.dims)
        return Layout(dims, how.partial, how.reduce)

    patch.setattr(ShardingState, "layout", flat)


@fault("slice")
def slice_off_by_one(patch: Patch) -> None:
    varying = ReshardBuilder._varying

    def shifted(self: ReshardBuilder, what: str, value: Any) -> gs.Constant:
        if what not in ("start", "end"):
            return varying(self, what, value)
        return varying(self, what, lambda rank: value(rank) - (rank > 0))

    patch.setattr(ReshardBuilder, "_varying", shifted)


@fault("segments")
def swapped_sizes_of_a_split(patch: Patch) -> None:
    def swap(node: gs.Node, rule: Rule) -> Rule:
        sizes = rule.ranks.local[1]
        return rule.with_op(local={**rule.ranks.local, 1: lambda at: sizes(at)[::-1].copy()})

    change_rule(patch, "Split", swap)


@fault("residual")
def value_kept_on_the_first_rank_of_all(patch: Patch) -> None:
    """Instead of the first of each group."""
    varying = ReshardBuilder._varying

    def first(self: ReshardBuilder, what: str, value: Any) -> gs.Constant:
        return varying(self, what, (lambda rank: np.array(rank == 0)) if what == "first" else value)

    patch.setattr(ReshardBuilder, "_varying", first)


@fault("residual")
def value_kept_on_all_ranks(patch: Patch) -> None:
    def identity(self: ReshardBuilder, x: gs.Tensor, y: gs.Tensor) -> None:
        self._add("Identity", [x], y)

    patch.setattr(ReshardBuilder, "_Select", identity)


@fault("mlp")
def uneven_parts_of_weights_reversed(patch: Patch) -> None:
    def smaller_first(size: int, counts: tuple[int, ...]) -> tuple[int, ...]:
        return layout.nested_parts(size, counts)[::-1]

    def indices(dim: Any, mesh: Mesh, rank: int) -> np.ndarray[Any, Any]:
        if isinstance(dim, Factor) and dim.axes:
            sizes = smaller_first(dim.size, tuple(a.size for a in dim.axes))
            at = mesh.coordinate(dim.axes, rank)
            start = sum(sizes[:at])
            return np.arange(start, start + sizes[at])
        return layout.indices(dim, mesh, rank)

    patch.setattr(weights, "indices", indices)


@fault("deadlock")
def no_token_through_the_collectives(patch: Patch) -> None:
    def run(self: OrderCollectives, graph: gs.Graph, ctx: PassContext) -> bool:
        ctx.lowered.ordered = True
        return False

    patch.setattr(OrderCollectives, "run", run)


@fault("square")
def gather_along_another_axis(patch: Patch) -> None:
    change_collective(patch, "AllGather", lambda _, attrs: attrs.update(axis=1 - attrs["axis"]))


@fault("swap")
def exchange_in_the_wrong_direction(patch: Patch) -> None:
    def turn(_: ReshardBuilder, attrs: dict[str, Any]) -> None:
        for what in ("axis", "sizes"):
            a, b = f"split_{what}", f"concat_{what}"
            attrs[a], attrs[b] = attrs[b], attrs[a]

    change_collective(patch, "AllToAll", turn)


@fault("mean")
def mean_of_unequal_means(patch: Patch) -> None:
    def lower(sizes: Any, operands: Any = ()) -> Any:
        def equal(build: Any) -> None:
            node = build.local.node
            mean = build.add(node.op, [build.input(0), *operands], **node.attrs)
            build.finish("Mul", [mean, np.array(0.5, np.float32)])

        return equal

    patch.setattr(reductions, "weighted_mean", lower)


@fault("groups")
def groups_of_a_convolution_not_localized(patch: Patch) -> None:
    change_rule(patch, "Conv", lambda node, rule: rule.with_op(local={}))


@fault("heads", "cut")
def global_target_of_a_reshape(patch: Patch) -> None:
    change_rule(patch, "Reshape", lambda node, rule: rule.with_op(local={}))


@fault("bent")
def sum_passes_a_nonlinear_op(patch: Patch) -> None:
    change_rule(patch, "Relu", lambda node, rule: replace(rule, linear=(frozenset({0}),)))


@fault("turned")
def transpose_that_ignores_its_order(patch: Patch) -> None:
    change_rule(patch, "Transpose", lambda node, rule: replace(rule, outputs=rule.inputs))


@fault("readers")
def reader_gets_the_layout_of_another(patch: Patch) -> None:
    serve = _Insertion._serve

    def mixed(
        self: _Insertion, tensor: gs.Tensor, made: FactorSharding, reads: Any, **rest: Any
    ) -> None:
        serve(self, tensor, made, reads, **rest)
        if len(reads) > 1:
            found = [read.node.inputs[read.index] for read in reads]
            for read, other in zip(reads, found[::-1], strict=True):
                read.take(other)

    patch.setattr(_Insertion, "_serve", mixed)


@fault("scattered segments")
def order_of_members_ignored(patch: Patch) -> None:
    """A reduce-scatter that takes what each member needs as if it lay in one run."""
    patch.setattr(ReshardBuilder, "_by_member", lambda self, x, axis, before, after: x)


@fault("gathered segments")
def gathered_parts_left_in_the_order_of_ranks(patch: Patch) -> None:
    def identity(
        self: ReshardBuilder, x: gs.Tensor, y: gs.Tensor, axis: int, held: Any, after: Any
    ) -> None:
        self._add("Identity", [x], y)

    patch.setattr(ReshardBuilder, "_order", identity)
