"""keep-collectives: each rank runs the graph of a manual program, with collectives that are written
by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.pass_ import LAYOUTS, LOCAL, Pass, PassContext, Stage
from onnxpar.cost.cost import bytes_sent
from onnxpar.graph.collectives import DOMAIN
from onnxpar.layout.layout import Factor, Layout
from onnxpar.sharding.planned_collectives import Collective
from onnxpar.sharding.shard_bytes import largest_shard_bytes
from onnxpar.strategy.handwritten import Handwritten, check_order
from onnxpar.strategy.manual import REPLICAS, Manual


@dataclass(frozen=True)
class KeepCollectives(Pass):
    """Settle groups, tags and peers of collectives that are written by hand, and shard tensors.

    Requires `ctx.request.manual`, and shapes of tensors as on one rank. Ensures layouts of inputs,
    outputs and weights, whose shapes become global. Ensures that collectives have no tokens, that
    all ranks can run them in graph order, and that values that differ by rank are in
    `ctx.lowered.per_rank`.

    compare_replicas  adds an output for each output: the copies of all ranks, to compare them

    Example: shard(mesh="tp=2", preset="manual", strategy={"tensors": {"x": [None, "tp"]}})

        total (float[2,3] x) => (float[2,3] y) { h = Exp(x)  y = onnxpar.AllReduce(h) }

    Before:

        mesh tp=2
        input  x: float32 2x3 whole
        h: float32 2x3 whole = Exp(x)
        y: float32 2x3 whole = onnxpar.AllReduce(h)
        output y: float32 2x3 whole

    After:

        mesh tp=2
        input  x: float32 2x6 [-, tp]
        h: float32 2x3 whole = Exp(x)
        y: float32 2x3 [-, -] = onnxpar.AllReduce(h) {tag=1}
        output y: float32 2x3 [-, -]
    """

    name: ClassVar[str] = "keep-collectives"
    stage = Stage.LOWER
    ensures = (
        LAYOUTS,
        LOCAL,
    )
    excludes = (LAYOUTS,)
    plan_after = True
    compare_replicas: bool = False

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        manual = ctx.request.manual
        assert manual is not None, "keep-collectives needs the preset manual"
        _set_layouts(graph, ctx, manual)
        if self.compare_replicas:
            _gather_replicas(graph, ctx, manual)
        written = Handwritten(graph, manual, ctx.lowered.per_rank)
        for node in graph.nodes:
            if node.domain == DOMAIN:
                written.settle(node)
        check_order(written.events, manual.mesh.size)
        ctx.lowered.collectives += [
            _entry(node, written, ctx)
            for node in graph.nodes
            if node.domain == DOMAIN and node.inputs
        ]
        ctx.lowered.localized = True
        return bool(ctx.lowered.collectives)


def _set_layouts(graph: gs.Graph, ctx: PassContext, manual: Manual) -> None:
    """Gives inputs, outputs and weights the layouts that the strategy says. Errors:
    StrategyError."""
    weights = [t for t in graph.tensors().values() if isinstance(t, gs.Constant)]
    ports = {t.name: t for t in [*graph.inputs, *graph.outputs]}
    manual.check_names([*ports, *(t.name for t in weights)])
    for weight in weights:
        ctx.layouts[weight.name] = manual.weight_layout(weight.name, weight.shape)
    for name, port in ports.items():
        is_known = port.shape is not None and all(isinstance(s, int) for s in port.shape)
        if is_known and name not in ctx.layouts:
            ctx.layouts[name] = manual.input_layout(name, port.shape)
            port.shape = list(ctx.layouts[name].shape)
        elif not is_known and manual.is_dealt(name):
            raise StrategyError(
                f"tensor '{name}' is split over the ranks, but its shape on one rank is not known "
                f"({port.shape}); declare it in the model, or bind its symbols with --dim"
            )
    whole = Layout(())
    for source, result in ctx.model.states:
        if ctx.layouts.get(source, whole).axes != ctx.layouts.get(result, whole).axes:
            raise StrategyError(
                f"state {source}={result}: the two have different layouts; give both the same "
                "entry in the strategy"
            )


def _gather_replicas(graph: gs.Graph, ctx: PassContext, manual: Manual) -> None:
    """Adds an output `NAME@replicas` for each output that ranks hold several times: its copies
    along the mesh axes that do not split it, stacked along a new first dimension."""
    step = ctx.model.step
    left_out = {*(t.name for t in graph.inputs), *(step.evaluation if step else ())}
    for output in list(graph.outputs):
        layout = ctx.layouts.get(output.name)
        used = {a.name for a in layout.axes} if layout is not None else set()
        axes = [name for name, size in manual.mesh.shape if name not in used and size > 1]
        if layout is None or not axes or output.name in left_out:
            continue
        copies = math.prod(manual.mesh.sizes[name] for name in axes)
        local_shape = layout.local_shape(manual.mesh, 0)
        name = output.name + REPLICAS
        row = gs.Variable(f"{name}::row", output.dtype, [1, *local_shape])
        rows = gs.Variable(name, output.dtype, [copies, *layout.shape])
        shape = gs.Constant(f"{name}::shape", np.array([1, *local_shape], np.int64))
        graph.nodes.append(gs.Node("Reshape", f"{name}::row", {}, [output, shape], [row]))
        attrs = {"axes": axes, "axis": 0, "sizes": [1] * copies}
        graph.nodes.append(gs.Node("AllGather", name, attrs, [row], [rows], domain=DOMAIN))
        graph.outputs.append(rows)
        ctx.layouts[name] = Layout((Factor(copies), *layout.dims))


def _entry(node: gs.Node, written: Handwritten, ctx: PassContext) -> Collective:
    """Returns the plan's entry for a hand-written collective. It has no layouts: only the program's
    author knows them."""
    x, mesh = node.inputs[0], written.mesh
    groups = {written.members(node, rank) for rank in range(mesh.size)}
    working = sorted((g for g in groups if len(g) > 1), key=lambda g: 0 not in g) or [*groups]
    is_known = x.dtype is not None and x.shape and all(isinstance(s, int) for s in x.shape)
    layout = ctx.layouts.get(x.name) or Layout.whole(x.shape if is_known else ())
    size = largest_shard_bytes(x, layout) if is_known else 0
    sent = size if node.op == "Send" else int(bytes_sent(node.op, len(working[0]), size))
    return Collective(
        node.op, node.name, working[0], len(working), sent, x.name, "by hand", "by hand"
    )
