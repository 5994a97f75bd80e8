"""compact-experts: each expert computes only the rows of tokens that the router chose for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import LOCAL, ORDER, Pass, PassContext, Stage
from onnxpar.cost.cost import bytes_sent
from onnxpar.graph.subgraphs import scopes
from onnxpar.layout.layout import Layout
from onnxpar.lowering.pair_program import PairProgram
from onnxpar.lowering.token_exchange import TokenExchange
from onnxpar.sharding.expert_cut import between_exchanges, crosses_to_experts
from onnxpar.sharding.expert_rows import ExpertRows, Role, Shapes
from onnxpar.sharding.find_expert_rows import find_expert_rows
from onnxpar.sharding.mixtures import CompactedMixture

_COUNT_BYTES = 8


@dataclass(frozen=True)
class CompactExperts(Pass):
    """Make the experts of a mixture compute, and ranks exchange, only the rows that are chosen.

    The loader writes a mixture so that every expert has a row for each token: zeros for the tokens
    of other experts. This pass makes a list of the pairs of an expert and a row that the expert
    computes, sorted by expert; all tensors between router and sum get a row for each pair. If a
    rank has few experts, the rows of each expert are a tensor of their own. Where ranks exchange
    the rows of all experts, they exchange only chosen rows: first the numbers of rows, then the
    rows, and the results back. The backward pass of a training step reads the same pairs.

    Requires local nodes (localize-ops). A mixture stays as it is if ranks communicate in another
    way between its nodes, or if a rank has no expert.

    Example: shard(mesh="ep=2", preset="expert-parallel")

        experts (float[3,2] x, bool[2,3,1] c) => (float[3,2] y)
        <float z = {0}, int64[1] i = {0}, float[2,2,2] w = {1, 2, 3, 4, 5, 6, 7, 8}>
        { a = Where(c, x, z)  b = MatMul(a, w)  d = Where(c, b, z)
          y = ReduceSum <keepdims = 0> (d, i) }

    Before:

        mesh ep=2
        input  x: float32 3x2 [-, -]
        input  c: bool 1x3x1 [ep, -, -]
        const  z: float32 scalar []
        const  w: float32 2x2x2 [ep, -, -]
        const  i: int64 1 [-] = [0]
        a: float32 2x3x2 [ep, -, -] = Where(c, x, z)
        b: float32 2x3x2 [ep, -, -] = MatMul(a, w)
        d: float32 2x3x2 [ep, -, -] = Where(c, b, z)
        y@1: float32 3x2 [-, -] sum(ep) = ReduceSum(d, i) {keepdims=0}
        y: float32 3x2 [-, -] = onnxpar.AllReduce(y@1) {group=[0, 1]/rank, op=sum, tag=1}
        output y: float32 3x2 [-, -]

    After:

        mesh ep=2
        input  x: float32 3x2 [-, -]
        input  c: bool 1x3x1 [ep, -, -]
        const  ReduceSum_y::pairs/Squeeze.0/axes: int64 1 whole = [2]
        const  ReduceSum_y::pairs/Gather.3/1: int64 scalar whole = 0
        const  ReduceSum_y::pairs/Gather.4/1: int64 scalar whole = 1
        const  ReduceSum_y::pairs/ReduceSum.6/axes: int64 1 whole = [1]
        const  ReduceSum_y::pairs/Unsqueeze.8/axes: int64 1 whole = [0]
        const  w: float32 2x2x2 [ep, -, -]
        const  ReduceSum_y::pairs/expert.0: int64 scalar whole = per rank, rank 0: 0
        const  ReduceSum_y::pairs/y@1/row: float32 1x1x2 whole = per rank, rank 0: [[[0. 0.]]]
        const  ReduceSum_y::pairs/ReduceSum.11/axes: int64 1 whole = [0]
        const  ReduceSum_y::pairs/Concat.12/1: int64 1 whole = [1]
        const  ReduceSum_y::pairs/CumSum.17/1: int64 scalar whole = 0
        const  ReduceSum_y::pairs/Sub.18/1: int64 scalar whole = 1
        const  ReduceSum_y::pairs/Unsqueeze.20/axes: int64 1 whole = [1]
        const  ReduceSum_y::pairs/Unsqueeze.21/axes: int64 1 whole = [1]
        const  ReduceSum_y::pairs/Squeeze.24/axes: int64 1 whole = [0]
        const  ReduceSum_y::pairs/Add.25/1: int64 scalar whole = 1
        const  ReduceSum_y::pairs/Range.26/0: int64 scalar whole = 1
        const  ReduceSum_y::pairs/Range.26/2: int64 scalar whole = 1
        const  ReduceSum_y::pairs/ReduceSum.29/axes: int64 2 whole = [0, 1]
        ReduceSum_y::pairs/Squeeze.0: bool ? whole = Squeeze(c, ReduceSum_y::pairs/Squeeze.0/axes)
        ReduceSum_y::pairs/Cast.1: int64 ? whole = Cast(ReduceSum_y::pairs/Squeeze.0) {to=7}
        ReduceSum_y::pairs/NonZero.2: int64 ? whole = NonZero(ReduceSum_y::pairs/Squeeze.0)
        ReduceSum_y::pairs/Gather.3: int64 ? whole = Gather(ReduceSum_y::pairs/NonZero.2,
                ReduceSum_y::pairs/Gather.3/1) {axis=0}
        ReduceSum_y::pairs/Gather.4: int64 ? whole = Gather(ReduceSum_y::pairs/NonZero.2,
                ReduceSum_y::pairs/Gather.4/1) {axis=0}
        ReduceSum_y::pairs/Transpose.5: int64 ? whole = Transpose(ReduceSum_y::pairs/NonZero.2)
                {perm=[1, 0]}
        ReduceSum_y::pairs/ReduceSum.6: int64 ? whole = ReduceSum(ReduceSum_y::pairs/Cast.1,
                ReduceSum_y::pairs/ReduceSum.6/axes) {keepdims=0}
        ReduceSum_y::pairs/rows.0: int64 ? whole = Split(ReduceSum_y::pairs/Gather.4,
                ReduceSum_y::pairs/ReduceSum.6) {axis=0}
        ReduceSum_y::pairs/Gather.7: float32 ? whole = Gather(x, ReduceSum_y::pairs/rows.0) {axis=0}
        ReduceSum_y::pairs/Unsqueeze.8: float32 ? whole = Unsqueeze(ReduceSum_y::pairs/Gather.7,
                ReduceSum_y::pairs/Unsqueeze.8/axes)
        ReduceSum_y::pairs/Gather.9: float32 ? whole = Gather(w, ReduceSum_y::pairs/expert.0)
                {axis=0}
        ReduceSum_y::pairs@0/b: float32 ? whole = MatMul(ReduceSum_y::pairs/Unsqueeze.8,
                ReduceSum_y::pairs/Gather.9)
        ReduceSum_y::pairs/Concat.10: float32 ? whole = Concat(ReduceSum_y::pairs/y@1/row,
                ReduceSum_y::pairs@0/b) {axis=1}
        ReduceSum_y::pairs/ReduceSum.11: int64 ? whole = ReduceSum(ReduceSum_y::pairs/Cast.1,
                ReduceSum_y::pairs/ReduceSum.11/axes) {keepdims=0}
        ReduceSum_y::pairs/Concat.12: int64 ? whole = Concat(ReduceSum_y::pairs/ReduceSum.11,
                ReduceSum_y::pairs/Concat.12/1) {axis=0}
        ReduceSum_y::pairs/ReduceMax.13: int64 ? whole = ReduceMax(ReduceSum_y::pairs/Concat.12)
                {keepdims=1}
        ReduceSum_y::pairs/Shape.14: int64 ? whole = Shape(ReduceSum_y::pairs/ReduceSum.11)
        ReduceSum_y::pairs/Concat.15: int64 ? whole = Concat(ReduceSum_y::pairs/ReduceMax.13,
                ReduceSum_y::pairs/Shape.14) {axis=0}
        ReduceSum_y::pairs/ConstantOfShape.16: int64 ? whole =
                ConstantOfShape(ReduceSum_y::pairs/Concat.15) {value=<y@1/empty>}
        ReduceSum_y::pairs/CumSum.17: int64 ? whole = CumSum(ReduceSum_y::pairs/Cast.1,
                ReduceSum_y::pairs/CumSum.17/1)
        ReduceSum_y::pairs/Sub.18: int64 ? whole = Sub(ReduceSum_y::pairs/CumSum.17,
                ReduceSum_y::pairs/Sub.18/1)
        ReduceSum_y::pairs/GatherND.19: int64 ? whole = GatherND(ReduceSum_y::pairs/Sub.18,
                ReduceSum_y::pairs/Transpose.5)
        ReduceSum_y::pairs/Unsqueeze.20: int64 ? whole = Unsqueeze(ReduceSum_y::pairs/GatherND.19,
                ReduceSum_y::pairs/Unsqueeze.20/axes)
        ReduceSum_y::pairs/Unsqueeze.21: int64 ? whole = Unsqueeze(ReduceSum_y::pairs/Gather.4,
                ReduceSum_y::pairs/Unsqueeze.21/axes)
        ReduceSum_y::pairs/Concat.22: int64 ? whole = Concat(ReduceSum_y::pairs/Unsqueeze.20,
                ReduceSum_y::pairs/Unsqueeze.21) {axis=1}
        ReduceSum_y::pairs/Shape.23: int64 ? whole = Shape(ReduceSum_y::pairs/Gather.4)
        ReduceSum_y::pairs/Squeeze.24: int64 ? whole = Squeeze(ReduceSum_y::pairs/Shape.23,
                ReduceSum_y::pairs/Squeeze.24/axes)
        ReduceSum_y::pairs/Add.25: int64 ? whole = Add(ReduceSum_y::pairs/Squeeze.24,
                ReduceSum_y::pairs/Add.25/1)
        ReduceSum_y::pairs/Range.26: int64 ? whole = Range(ReduceSum_y::pairs/Range.26/0,
                ReduceSum_y::pairs/Add.25, ReduceSum_y::pairs/Range.26/2)
        ReduceSum_y::pairs/ScatterND.27: int64 ? whole =
                ScatterND(ReduceSum_y::pairs/ConstantOfShape.16, ReduceSum_y::pairs/Concat.22,
                ReduceSum_y::pairs/Range.26)
        ReduceSum_y::pairs/Gather.28: float32 ? whole = Gather(ReduceSum_y::pairs/Concat.10,
                ReduceSum_y::pairs/ScatterND.27) {axis=1}
        y@1: float32 3x2 [-, -] sum(ep) = ReduceSum(ReduceSum_y::pairs/Gather.28,
                ReduceSum_y::pairs/ReduceSum.29/axes) {keepdims=0}
        y: float32 3x2 [-, -] = onnxpar.AllReduce(y@1) {group=[0, 1]/rank, op=sum, tag=1}
        output y: float32 3x2 [-, -]
    """

    name: ClassVar[str] = "compact-experts"
    stage = Stage.LOWER
    requires = (LOCAL,)
    excludes = (ORDER,)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        changed = False
        shapes = {name: layout.shape for name, layout in ctx.layouts.items()}
        for scope in list(scopes(graph)):
            for mixture in list(find_expert_rows(scope, shapes)):
                changed |= _compact(scope, mixture, shapes, ctx)
        return changed


def _compact(scope: gs.Graph, mixture: ExpertRows, shapes: Shapes, ctx: PassContext) -> bool:
    """Makes a mixture compute and send only its chosen rows. False if it stays as it is."""
    mesh, layouts = ctx.sharding.mesh, ctx.layouts
    exchanges = mixture.of(Role.CROSSING)
    inside = between_exchanges(mixture, shapes) if exchanges else frozenset()
    if inside is None or not _is_uniform(mixture, exchanges, layouts):
        return False
    there = [node for node in exchanges if crosses_to_experts(node)]
    rows = layouts[(there or mixture.enter)[0].outputs[0].name]
    experts = [rows.local_shape(mesh, rank)[0] for rank in range(mesh.size)]
    if not all(experts):
        return False

    def columns(tensor: gs.Tensor, rank: int) -> tuple[int, ...]:
        return layouts.get(tensor.name, rows).local_shape(mesh, rank)[2:]

    name = mixture.total.outputs[0].name.split("@")[0]
    tag = len(ctx.lowered.collectives) + 1
    program = PairProgram(
        scope, mixture, shapes, experts, columns, ctx.lowered.per_rank, inside, tag
    )
    program.replace()
    if exchanges:
        _update_plan(program.exchange, {node.name for node in exchanges}, rows, ctx)
    ctx.lowered.mixtures.append(CompactedMixture(name, program.finder, rows))
    return True


def _is_uniform(
    mixture: ExpertRows, exchanges: Sequence[gs.Node], layouts: Mapping[str, Layout]
) -> bool:
    """True if all tensors of rows at the ranks of tokens are split over the same axes, and all
    tensors of rows at the ranks of experts, too."""
    back = [node for node in exchanges if not crosses_to_experts(node)]
    there = [node for node in exchanges if crosses_to_experts(node)]
    sides = [*mixture.enter, *back], there
    return all(len({layouts[n.outputs[0].name].dims[:2] for n in side}) <= 1 for side in sides)


def _update_plan(
    exchange: TokenExchange, names: Collection[str], inner: Layout, ctx: PassContext
) -> None:
    """Updates the plan's list of collectives: the exchanges of rows, which have these names, get
    data-dependent sizes; a new entry before them exchanges the numbers of rows. `inner` is the
    layout of rows at the ranks of experts."""
    listed = ctx.lowered.collectives
    for i, entry in enumerate(listed):
        if entry.name in names:
            listed[i] = replace(entry, kind="AllToAllV")
    first = next(i for i, entry in enumerate(listed) if entry.name in names)
    size = _COUNT_BYTES * inner.shape[0]
    sent = int(bytes_sent("AllToAll", len(listed[first].group), size))
    entry = replace(
        listed[first], kind="AllToAll", name=exchange.counts, bytes=sent, operand=size,
        tensor=f"rows per expert of {listed[first].tensor}", before="-", after="-",
    )  # fmt: skip
    listed.insert(first, entry)
