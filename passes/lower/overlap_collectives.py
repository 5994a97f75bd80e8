"""overlap-collectives: start collectives early and complete them late."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import LOCAL, ORDER, Pass, PassContext, Stage
from onnxpar.compiler.summarize_plan import peak_activations
from onnxpar.cost.cost import Costs
from onnxpar.graph.collectives import COMPLETE, KINDS
from onnxpar.lowering.buckets import PART_BYTES
from onnxpar.lowering.fill_windows import fill, find_fillings
from onnxpar.lowering.hidden_communication import hidden_seconds
from onnxpar.lowering.hold_back import hold_back
from onnxpar.lowering.overlap import Windows, is_collective, split
from onnxpar.lowering.streams import GroupsOf, assign_streams, groups_of
from onnxpar.sharding.planned_collectives import Collective

OVERLAPS = ("auto", "on", "off")
HANDED = 50e-6
"""Seconds to hand a collective to a thread, and its result back."""


@dataclass(frozen=True)
class OverlapCollectives(Pass):
    """Replace collectives by a start and a completion, with independent nodes in between.

    Meanwhile, threads of the plugin move the bytes, one thread for each group of ranks with started
    collectives: the collectives of a group are a stream, and streams run at once. Reductions of
    gradients start at their place and complete at the update. Gathers of parameters start while
    nodes before their reader compute: for two nodes ahead, or up to 8 MiB. A Gate behind each start
    makes the next node wait until the operand is computed; otherwise onnxruntime might compute a
    gradient last. Where too little runs between a collective between hosts and its first reader,
    other nodes move there: a shared expert computes while tokens travel to the experts.

    Requires rank-local nodes (localize-ops), and collectives that are not ordered yet. Ensures the
    same results, bit by bit.

    when  auto: collectives between hosts that get faster, by the cost model; on: all collectives
          with compute in between; off: none

    Example: shard(mesh="tp=2", overlap="on", strategy={"tensors": {"x": [None, "tp"]}})

        two (float[4,6] x, float[6,3] w, float[4,3] b) => (float[4,3] z)
        { y = MatMul(x, w)  c = Exp(b)  z = Max(y, c) }

    Before:

        mesh tp=2
        input  x: float32 4x3 [-, tp]
        input  b: float32 4x3 [-, -]
        const  w: float32 6x3 [tp, -]
        y: float32 4x3 [-, -] sum(tp) = MatMul(x, w)
        y@1: float32 4x3 [-, -] = onnxpar.AllReduce(y) {group=[0, 1]/rank, op=sum, tag=1}
        c: float32 4x3 [-, -] = Exp(b)
        z: float32 4x3 [-, -] = Max(y@1, c)
        output z: float32 4x3 [-, -]

    After:

        mesh tp=2
        input  x: float32 4x3 [-, tp]
        input  b: float32 4x3 [-, -]
        const  w: float32 6x3 [tp, -]
        y: float32 4x3 [-, -] sum(tp) = MatMul(x, w)
        AllReduce_y@1::pending: float32 ? whole = onnxpar.StartAllReduce(y) {group=[0, 1]/rank,
                op=sum, tag=1}
        c: float32 4x3 [-, -] = Exp(b)
         = onnxpar.After(c)
        y@1: float32 4x3 [-, -] = onnxpar.Complete(AllReduce_y@1::pending)
        c::held: float32 4x3 whole = onnxpar.Gate(c)
        z: float32 4x3 [-, -] = Max(y@1, c::held)
        output z: float32 4x3 [-, -]
    """

    name: ClassVar[str] = "overlap-collectives"
    stage = Stage.LOWER
    requires = (LOCAL,)
    excludes = (ORDER,)
    when: str = "auto"

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        if self.when == "off":
            return False
        groups = groups_of(ctx.lowered.per_rank, ctx.sharding.mesh.size)
        heavy = {op.node.name for op in ctx.sharding.factors.ops}
        planned = {entry.name: entry for entry in ctx.lowered.collectives}
        idle = self._idle(graph, planned, ctx.sharding.costs, groups)
        is_limited = ctx.request.objective.memory is not None  # moved nodes keep operands longer
        if ctx.choices.started is None and not is_limited:
            order = list(graph.nodes)
            ctx.choices.fillings = find_fillings(
                graph, heavy, groups, ctx.lowered.seconds, idle,
                lambda name: _start_seconds(planned[name], ctx.sharding.costs),
            )  # fmt: skip
            if ctx.choices.fillings:
                peaks = [peak_activations(graph, nodes, ctx) for nodes in (order, graph.nodes)]
                ctx.lowered.held = max(peaks[1] - peaks[0], 0)
        else:
            fill(graph, heavy, groups, ctx.choices.fillings)
        fillings = ctx.choices.fillings
        awaited = {filling.collective: filling.awaited for filling in fillings}
        moved = {name: filling.collective for filling in fillings for name in filling.nodes}
        windows = Windows(graph, heavy, groups, awaited)
        if ctx.choices.started is None:
            ctx.choices.started = self._choose(ctx, windows, planned, idle)
        chosen = windows.find(ctx.choices.started, PART_BYTES)
        split(graph, chosen)
        starts = sum(_start_seconds(planned[w.collective.name], ctx.sharding.costs) for w in chosen)
        ctx.lowered.hidden = hidden_seconds(graph.nodes, ctx.lowered.seconds, idle, starts)
        hold_back(graph, moved)
        ctx.lowered.streams = assign_streams(graph, groups)
        return bool(chosen)

    def _choose(
        self,
        ctx: PassContext,
        windows: Windows,
        planned: Mapping[str, Collective],
        idle: Mapping[str, float],
    ) -> dict[str, int]:
        """Returns the collectives to start early, by name, each with the bytes of its operands.

        windows  finds the nodes that can run between a collective's start and its completion
        planned  the plan's entry of each collective, by name
        idle     the seconds in which each collective leaves the cores idle, by name
        """
        chosen = {}
        always = self.when == "on"
        sizes = {name: planned[name].operand for name in idle if always or idle[name] > 0.0}
        for window in windows.find(sizes, PART_BYTES):
            name = window.collective.name
            work = sum(ctx.lowered.seconds.get(node.name, 0.0) for node in window.between)
            pays = min(idle[name], work) > _start_seconds(planned[name], ctx.sharding.costs)
            if pays or (always and window.between):
                chosen[name] = sizes[name]
        return chosen

    def _idle(
        self, graph: gs.Graph, planned: Mapping[str, Collective], costs: Costs, groups: GroupsOf
    ) -> dict[str, float]:
        """Returns the seconds in which each collective leaves the cores idle, by name. Empty if
        overlap cannot pay: `when` is auto, and all ranks are on one host."""
        if self.when == "auto" and len(costs.topology.levels) == 1:
            return {}
        return {
            node.name: costs.idle(entry.kind, groups(node).each, entry.operand)
            for node in graph.nodes
            if (entry := planned.get(node.name)) is not None
            and is_collective(node)
            and KINDS[node.op].is_started
        }


def _start_seconds(entry: Collective, costs: Costs) -> float:
    """Returns the seconds that it costs to start and complete a collective."""
    return HANDED + 2 * costs.local(COMPLETE, entry.operand)
