"""compact-experts: each expert computes only the rows of its own tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import LOCAL, ORDER, Pass, PassContext, Stage
from onnxpar.cost.cost import bytes_sent
from onnxpar.graph.subgraphs import scopes
from onnxpar.layout.layout import Layout
from onnxpar.lowering.compaction import Compaction
from onnxpar.lowering.pair_program import PairProgram
from onnxpar.lowering.token_exchange import TokenExchange
from onnxpar.sharding.chosen_rows import (
    EXCHANGE,
    ChosenRows,
    Crossing,
    Shapes,
    crossing,
    find_chosen_rows,
)
from onnxpar.sharding.mixtures import CompactedMixture
from onnxpar.sharding.trained_rows import TrainedRows, find_trained_rows

_COUNT_BYTES = 8


@dataclass(frozen=True)
class CompactExperts(Pass):
    """Replace the rows of zeros of a mixture of experts by a Scan over the rank's experts.

    The loader writes a mixture so that every expert has a row for each token: zeros for the tokens
    of other experts. The body of the Scan computes only the rows that are not zeros. Where ranks
    exchange the rows of all experts, this pass makes them exchange only rows that are not zeros:
    first the numbers of rows, then the rows, and the results back. If nodes outside the mixture
    read values inside, as a backward pass does, there is no Scan: forward and backward pass compute
    one list of the rows of all experts. Requires local nodes. A mixture stays as it is if ranks
    communicate in another way between its nodes, or if a rank has no expert.

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
        const  ReduceSum_y::experts/one: int64 1 whole = [1]
        const  ReduceSum_y::experts/columns: int64 1 whole = per rank, rank 0: [2]
        const  w: float32 2x2x2 [ep, -, -]
        const  ReduceSum_y::experts/first: int64 scalar whole = 0
        const  ReduceSum_y::experts/Unsqueeze.3/axes: int64 1 whole = [0]
        const  ReduceSum_y::experts/Unsqueeze.4/axes: int64 1 whole = [0]
        const  ReduceSum_y::experts/Squeeze.5/axes: int64 1 whole = [0]
        const  ReduceSum_y::experts/Unsqueeze.8/axes: int64 1 whole = [1]
        ReduceSum_y::experts/Shape: int64 ? whole = Shape(c)
        ReduceSum_y::experts/Gather: int64 ? whole = Gather(ReduceSum_y::experts/Shape,
                ReduceSum_y::experts/one) {axis=0}
        ReduceSum_y::experts/Concat: int64 ? whole = Concat(ReduceSum_y::experts/Gather,
                ReduceSum_y::experts/columns) {axis=0}
        ReduceSum_y::experts/ConstantOfShape: float32 ? whole =
                ConstantOfShape(ReduceSum_y::experts/Concat) {value=<ReduceSum_y::experts/zero>}
        y@1: float32 3x2 [-, -] sum(ep) = Scan(ReduceSum_y::experts/ConstantOfShape, c, w)
                {body=<ReduceSum_y::experts>, num_scan_inputs=2}
          ReduceSum_y::experts:
            input  ReduceSum_y::experts/sum: float32 ? whole
            input  ReduceSum_y::experts/expert.0: bool ? whole
            input  ReduceSum_y::experts/expert.1: float32 ? whole
            ReduceSum_y::experts/NonZero.0: int64 ? whole = NonZero(ReduceSum_y::experts/expert.0)
            ReduceSum_y::experts/Gather.1: int64 ? whole = Gather(ReduceSum_y::experts/NonZero.0,
                ReduceSum_y::experts/first) {axis=0}
            ReduceSum_y::experts/Gather.2: float32 ? whole = Gather(x,
                ReduceSum_y::experts/Gather.1) {axis=0}
            ReduceSum_y::experts/Unsqueeze.3: float32 ? whole =
                Unsqueeze(ReduceSum_y::experts/Gather.2, ReduceSum_y::experts/Unsqueeze.3/axes)
            ReduceSum_y::experts/Unsqueeze.4: float32 ? whole =
                Unsqueeze(ReduceSum_y::experts/expert.1, ReduceSum_y::experts/Unsqueeze.4/axes)
            ReduceSum_y::experts/b: float32 ? whole = MatMul(ReduceSum_y::experts/Unsqueeze.3,
                ReduceSum_y::experts/Unsqueeze.4)
            ReduceSum_y::experts/Squeeze.5: float32 ? whole = Squeeze(ReduceSum_y::experts/b,
                ReduceSum_y::experts/Squeeze.5/axes)
            ReduceSum_y::experts/Gather.6: float32 ? whole = Gather(ReduceSum_y::experts/sum,
                ReduceSum_y::experts/Gather.1) {axis=0}
            ReduceSum_y::experts/Add.7: float32 ? whole = Add(ReduceSum_y::experts/Gather.6,
                ReduceSum_y::experts/Squeeze.5)
            ReduceSum_y::experts/Unsqueeze.8: int64 ? whole =
                Unsqueeze(ReduceSum_y::experts/Gather.1, ReduceSum_y::experts/Unsqueeze.8/axes)
            ReduceSum_y::experts/ScatterND.9: float32 NonexNone whole =
                ScatterND(ReduceSum_y::experts/sum, ReduceSum_y::experts/Unsqueeze.8,
                ReduceSum_y::experts/Add.7)
            output ReduceSum_y::experts/ScatterND.9: float32 NonexNone whole
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
            for mixture in list(find_chosen_rows(scope, shapes)):
                changed |= _compact(scope, mixture, shapes, ctx)
            for trained in list(find_trained_rows(scope, shapes)):
                changed |= _compact_trained(scope, trained, shapes, ctx)
        return changed


def _compact(scope: gs.Graph, mixture: ChosenRows, shapes: Shapes, ctx: PassContext) -> bool:
    """Makes a mixture compute and send only its chosen rows; False if it stays as it is."""
    mesh, per_rank = ctx.sharding.mesh, ctx.lowered.per_rank
    is_exchanged = any(node.op == EXCHANGE for node in mixture.inside)
    moves = crossing(mixture) if is_exchanged else None
    experts = ctx.layouts[(moves.there[0].outputs[0] if moves else mixture.chosen).name]
    has_experts = all(experts.local_shape(mesh, rank)[0] for rank in range(mesh.size))
    if not has_experts or (is_exchanged and moves is None):
        return False
    columns = ctx.layouts[mixture.leave.outputs[0].name]

    def width(rank: int) -> int:
        return columns.local_shape(mesh, rank)[2]

    name = mixture.total.outputs[0].name.split("@")[0]
    if moves is None:
        rows = ctx.layouts[mixture.enter[0].outputs[0].name]
        compaction = Compaction(scope, mixture, shapes, width, per_rank)
        ctx.lowered.mixtures.append(CompactedMixture(name, compaction.name, rows))
        compaction.replace()
        return True
    inner = ctx.layouts[moves.back.inputs[0].name]
    tag = len(ctx.lowered.collectives) + 1
    exchange = TokenExchange(scope, mixture, moves, shapes, width, per_rank, tag)
    _update_plan(exchange, moves, inner, ctx)
    received = exchange.replace()
    # Received rows come from all ranks: no operand inside has a value for each of them.
    local_shapes = {**shapes, received.chosen.name: (inner.shape[0], -1, 1)}
    local_shapes |= {node.inputs[1].name: (-1, inner.shape[2]) for node in received.enter}
    compaction = Compaction(
        scope, received, local_shapes, lambda rank: inner.local_shape(mesh, rank)[2], per_rank
    )
    ctx.lowered.mixtures.append(CompactedMixture(name, compaction.name, inner))
    compaction.replace()
    return True


def _compact_trained(
    scope: gs.Graph, mixture: TrainedRows, shapes: Shapes, ctx: PassContext
) -> bool:
    """Makes the forward and the backward pass of a mixture compute only chosen rows; False if a
    rank has no expert."""
    mesh = ctx.sharding.mesh
    experts = ctx.layouts[mixture.chosen.name]
    if not all(experts.local_shape(mesh, rank)[0] for rank in range(mesh.size)):
        return False
    PairProgram(scope, mixture, shapes, ctx.layouts, mesh, ctx.lowered.per_rank).replace()
    return True


def _update_plan(exchange: TokenExchange, moves: Crossing, inner: Layout, ctx: PassContext) -> None:
    """Updates the collectives of the plan: exchanges of rows get data-dependent sizes; a new entry
    before them exchanges the numbers of rows."""
    names = {node.name for node in (*moves.there, moves.back)}
    listed = ctx.lowered.collectives
    for i, entry in enumerate(listed):
        if entry.name in names:
            listed[i] = replace(entry, kind="AllToAllV")
    first = next(i for i, e in enumerate(listed) if e.name == moves.there[0].name)
    size = _COUNT_BYTES * inner.shape[0]
    sent = int(bytes_sent("AllToAll", len(listed[first].group), size))
    entry = replace(
        listed[first], kind="AllToAll", name=exchange.counts, bytes=sent, operand=size,
        tensor=f"rows per expert of {listed[first].tensor}", before="-", after="-",
    )  # fmt: skip
    listed.insert(first, entry)
