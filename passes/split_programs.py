"""split-programs: what can be computed alone becomes a graph of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import LOCAL, ORDER, Pass, PassContext, Stage
from onnxpar.ir.clone import clone_nodes, needed
from onnxpar.ir.collectives import DOMAIN
from onnxpar.ir.subgraphs import all_nodes
from onnxpar.ir.training_spec import EVALUATION


@dataclass(frozen=True)
class SplitPrograms(Pass):
    """Take the evaluation of a training step out of it, as a program over the same states.

    Requires a localized graph, whose collectives are not ordered yet. Ensures that the graph has
    the outputs of the step alone and the nodes that these need, `ctx.programs` the others' graph,
    and that layouts of what both read are the same.
    """

    name: ClassVar[str] = "split-programs"
    stage = Stage.LOWER
    requires = (LOCAL,)
    excludes = (ORDER,)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        step = ctx.model.step
        apart = set(step.evaluation) if step else set()
        if not apart:
            return False
        outputs = [t for t in graph.outputs if t.name in apart]
        nodes, copies = clone_nodes(needed(graph, [t.name for t in outputs]))
        ctx.programs[EVALUATION] = gs.Graph(
            nodes,
            list(graph.inputs),
            [copies[id(t)] for t in outputs],
            EVALUATION,
            opset=graph.opset,
            import_domains=graph.import_domains,
            ir_version=graph.ir_version,
        )
        graph.outputs = [t for t in graph.outputs if t.name not in apart]
        graph.nodes = needed(graph, [t.name for t in graph.outputs])
        named = {n.name for n in all_nodes(graph) if n.domain == DOMAIN}
        ctx.collectives = [c for c in ctx.collectives if c.name in named]
        return True
