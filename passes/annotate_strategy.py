"""annotate-strategy: what people and presets ask for becomes seeds of the propagation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.passes.pass_ import Pass, PassContext
from onnxpar.search.presets import default_rounds, preset_rounds
from onnxpar.strategy import seeds_of


@dataclass(frozen=True)
class AnnotateStrategy(Pass):
    """Turn the strategy and the preset into seeds, in rounds of falling priority.

    Requires nothing. Ensures `ctx.seeds`: first what the user asked for, then the preset, then data
    parallelism along the batch over the axis `dp`, where the mesh has one.
    """

    name: ClassVar[str] = "annotate-strategy"

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        ctx.seeds = []
        if ctx.strategy is not None:
            ctx.seeds.append(list(seeds_of(ctx.strategy, ctx.sharding)))
        if ctx.preset is None:
            ctx.seeds += default_rounds(graph, ctx.sharding)
        else:
            ctx.seeds += preset_rounds(graph, ctx.sharding, ctx.preset)
        return bool(ctx.seeds)
