"""split-programs: make the evaluation of a training step a graph of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import LOCAL, ORDER, Pass, PassContext, Stage
from onnxpar.graph.clone import clone_nodes, needed
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.graph.training_spec import EVALUATION


@dataclass(frozen=True)
class SplitPrograms(Pass):
    """Take the evaluation out of a training step, as a program over the same states.

    Requires a localized graph whose collectives are not ordered yet. Ensures that the graph has
    only the outputs of the step and the nodes that they need, that `ctx.lowered.programs` has the
    graph of the evaluation, and that both graphs read their inputs in the same layouts.

    Example: grad(loss="y", optimizer="none"), shard(mesh="dp=2", preset="data-parallel")

        total (float[4,2] x, float[2,1] w) => (float y)
        { h = MatMul(x, w)  y = ReduceSum<keepdims = 0>(h) }

    Before:

        mesh dp=2
        input  x: float32 2x2 [dp, -]
        input  w: float32 2x1 [-, -]
        const  ReduceSum_y.grad/Expand.4: float32 4x1 [dp, -]
        h: float32 4x1 [dp, -] = MatMul(x, w)
        y: float32 scalar [] sum(dp) = ReduceSum(h) {keepdims=0}
        y@1: float32 scalar [] = onnxpar.AllReduce(y) {group=[0, 1]/rank, op=sum, tag=1}
        MatMul_h.grad/Transpose.3: float32 2x4 [-, dp] = Transpose(x) {perm=[1, 0]}
        MatMul_h.grad/MatMul.4: float32 2x1 [-, -] sum(dp) = MatMul(MatMul_h.grad/Transpose.3,
                ReduceSum_y.grad/Expand.4)
        MatMul_h.grad/MatMul.4@1: float32 2x1 [-, -] = onnxpar.AllReduce(MatMul_h.grad/MatMul.4)
                {group=[0, 1]/rank, op=sum, tag=2}
        loss: float32 scalar [] = Identity(y@1)
        w.grad: float32 2x1 [-, -] = Identity(MatMul_h.grad/MatMul.4@1)
        evaluation.loss: float32 scalar [] = Identity(y@1)
        output loss: float32 scalar []
        output w.grad: float32 2x1 [-, -]
        output evaluation.loss: float32 scalar []

    After:

        mesh dp=2
        input  x: float32 2x2 [dp, -]
        input  w: float32 2x1 [-, -]
        const  ReduceSum_y.grad/Expand.4: float32 4x1 [dp, -]
        h: float32 4x1 [dp, -] = MatMul(x, w)
        y: float32 scalar [] sum(dp) = ReduceSum(h) {keepdims=0}
        y@1: float32 scalar [] = onnxpar.AllReduce(y) {group=[0, 1]/rank, op=sum, tag=1}
        MatMul_h.grad/Transpose.3: float32 2x4 [-, dp] = Transpose(x) {perm=[1, 0]}
        MatMul_h.grad/MatMul.4: float32 2x1 [-, -] sum(dp) = MatMul(MatMul_h.grad/Transpose.3,
                ReduceSum_y.grad/Expand.4)
        MatMul_h.grad/MatMul.4@1: float32 2x1 [-, -] = onnxpar.AllReduce(MatMul_h.grad/MatMul.4)
                {group=[0, 1]/rank, op=sum, tag=2}
        loss: float32 scalar [] = Identity(y@1)
        w.grad: float32 2x1 [-, -] = Identity(MatMul_h.grad/MatMul.4@1)
        output loss: float32 scalar []
        output w.grad: float32 2x1 [-, -]

        // evaluation
        mesh dp=2
        input  x: float32 2x2 [dp, -]
        input  w: float32 2x1 [-, -]
        h: float32 4x1 [dp, -] = MatMul(x, w)
        y: float32 scalar [] sum(dp) = ReduceSum(h) {keepdims=0}
        y@1: float32 scalar [] = onnxpar.AllReduce(y) {group=[0, 1]/rank, op=sum, tag=1}
        evaluation.loss: float32 scalar [] = Identity(y@1)
        output evaluation.loss: float32 scalar []
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
        ctx.lowered.programs[EVALUATION] = gs.Graph(
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
        ctx.lowered.collectives = [c for c in ctx.lowered.collectives if c.name in named]
        return True
