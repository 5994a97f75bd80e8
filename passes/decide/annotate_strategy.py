"""annotate-strategy: turn the strategy and the preset into annotations (requests for layouts),
which propagation spreads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.open_errors import at_open_sizes
from onnxpar.compiler.pass_ import ANNOTATIONS, Pass, PassContext, Stage
from onnxpar.search.behind_sums import SplitBehindSums
from onnxpar.strategy.presets import ADDING, default_rounds, preset_rounds
from onnxpar.strategy.requests import requests


@dataclass(frozen=True)
class AnnotateStrategy(Pass):
    """Turn the strategy and the preset into annotations (requests for layouts), in rounds of
    falling priority.

    Requires nothing. Ensures `ctx.annotations`, the rounds, and `ctx.asked`: the annotations of the
    model and of the user, which must agree, and which the plan keeps. The first rounds are
    `ctx.asked`; a node's annotation extends to the nodes that a training step derives from that
    node. Later rounds come from the search, or from the preset; without both, from data
    parallelism: the axis `dp`, if the mesh has one, splits the batch. Presets whose ranks add up
    activations end with `SplitBehindSums`, unless the model is a training step.

    Example: shard(mesh="tp=2", strategy={"tensors": {"w": ["tp", None]}})

        product (float[4,6] x, float[6,8] w) => (float[4,8] y) { y = MatMul(x, w) }

    Before:

        mesh tp=2
        input  x: float32 4x6 [-, -]
        const  w: float32 6x8 [-, -]
        y: float32 4x8 [-, -] = MatMul(x, w)
        output y: float32 4x8 [-, -]

    After:

        mesh tp=2
        annotate w: [tp, -] {round=1}
        input  x: float32 4x6 [-, -]
        const  w: float32 6x8 [-, -]
        y: float32 4x8 [-, -] = MatMul(x, w)
        output y: float32 4x8 [-, -]
    """

    name: ClassVar[str] = "annotate-strategy"
    stage = Stage.DECIDE
    ensures = (ANNOTATIONS,)
    excludes = (ANNOTATIONS,)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        with at_open_sizes(ctx.model):
            ctx.asked, ctx.annotations = requests(
                ctx.request.annotated, ctx.request.strategy, ctx.sharding
            )
            if ctx.request.solution is not None:
                ctx.annotations.append(ctx.request.solution)
            elif ctx.request.preset is None:
                ctx.annotations += default_rounds(graph, ctx.sharding, ctx.model.step)
            else:
                step = ctx.model.step
                states = ctx.model.states if step is None else ()
                ctx.annotations += preset_rounds(
                    graph, ctx.sharding, ctx.request.preset, step, states
                )
                if step is None and ctx.request.preset in ADDING:
                    goal = ctx.request.objective.goal
                    ctx.annotations.append([SplitBehindSums(tuple(states), goal)])
        return bool(ctx.annotations)
