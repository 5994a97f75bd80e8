"""annotate-strategy: what people and presets ask for becomes seeds of the propagation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import ANNOTATIONS, Pass, PassContext, Stage
from onnxpar.errors import SizeError
from onnxpar.presets.presets import default_rounds, preset_rounds
from onnxpar.search.search import AUTO, EXHAUSTIVE, solve
from onnxpar.strategy.annotated_strategy import check_agreement, onnx_annotations
from onnxpar.strategy.derived_annotations import with_derived
from onnxpar.strategy.entries import annotations_of
from onnxpar.strategy.strategy import Annotation


@dataclass(frozen=True)
class AnnotateStrategy(Pass):
    """Turn the strategy and the preset into annotations, in rounds of falling priority.

    Requires nothing. Ensures `ctx.asked`: the annotations of the model and of the user, which must
    agree and which the plan must keep. Ensures `ctx.annotations`: in the first rounds those of
    `ctx.asked`, each with annotations of the nodes that a training step derives from its node; then
    those that the search finds, or those of the preset, or data parallelism: the batch is split
    over the axis `dp`, where the mesh has one.

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

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        try:
            self._collect(graph, ctx)
        except SizeError as error:
            sizes = ctx.model.sizes
            if sizes is None:
                raise
            imagined = ", ".join(f"{k}={v}" for k, v in sizes.bindings[0].items())
            raise SizeError(
                f"{error}; sizes are open (here imagined as {imagined}): give {sizes.flags} to fix "
                "them"
            ) from None
        return bool(ctx.annotations)

    def _collect(self, graph: gs.Graph, ctx: PassContext) -> None:
        ctx.annotations, ctx.asked = [], []
        if ctx.annotated is not None:
            noted: list[Annotation] = list(onnx_annotations(ctx.annotated, ctx.sharding))
            ctx.asked += noted
            ctx.annotations.append(with_derived(noted, ctx.sharding))
        if ctx.strategy is not None:
            asked: list[Annotation] = list(annotations_of(ctx.strategy, ctx.sharding))
            check_agreement(ctx.annotations[0] if ctx.annotations else [], asked, ctx.sharding.mesh)
            ctx.asked += asked
            ctx.annotations.append(with_derived(asked, ctx.sharding))
        if ctx.preset in (AUTO, EXHAUSTIVE):
            if ctx.found is None:
                ctx.found = solve(
                    graph,
                    ctx.sharding,
                    ctx.model.states,
                    given=ctx.annotations,
                    how=ctx.preset,
                    objective=ctx.objective,
                    step=ctx.model.step,
                ).annotations
            ctx.annotations.append(ctx.found)
        elif ctx.preset is None:
            ctx.annotations += default_rounds(graph, ctx.sharding, ctx.model.step)
        else:
            ctx.annotations += preset_rounds(graph, ctx.sharding, ctx.preset, ctx.model.step)
