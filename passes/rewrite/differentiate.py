"""differentiate: append the gradients of a loss to the global graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.graph.training_spec import GRADIENT
from onnxpar.training.backward import LOSS, add_backward
from onnxpar.training.rewrite import add_output
from onnxpar.training.step_state import StepRequest


@dataclass(frozen=True)
class Differentiate(Pass):
    """Append the backward pass: an output NAME.grad for every weight that is trained.

    Requires a model that was loaded for training, before any layout is decided. Ensures that the
    graph has standard ONNX ops only, and that trained weights are inputs with default values.

    loss    as for `onnxpar grad`: softmax-cross-entropy, mse, and so on, or an output
    output  the output from which the loss is computed, if the model has several outputs
    params  a glob: the weights to train
    frozen  a glob: the weights to leave out

    Example: shard(mesh="dp=1", passes=["differentiate{loss=y}"])

        total (float[4,2] x, float[2,1] w) => (float y)
        { h = MatMul(x, w)  y = ReduceSum<keepdims = 0>(h) }

    Before:

        mesh dp=1
        input  x: float32 4x2 [-, -]
        const  w: float32 2x1 [-, -]
        h: float32 4x1 [-, -] = MatMul(x, w)
        y: float32 scalar [] = ReduceSum(h) {keepdims=0}
        output y: float32 scalar []

    After:

        mesh dp=1
        input  x: float32 4x2 [-, -]
        input  w: float32 2x1 [-, -]
        const  loss/constant.1: float32 scalar [] = 1.0
        const  ReduceSum_y.grad/constant.1: int64 2 [-] = [1, 1]
        const  ReduceSum_y.grad/constant.3: int64 2 [-] = [4, 1]
        h: float32 4x1 [-, -] = MatMul(x, w)
        y: float32 scalar [] = ReduceSum(h) {keepdims=0}
        ReduceSum_y.grad/Reshape.2: float32 1x1 [-, -] = Reshape(loss/constant.1,
                ReduceSum_y.grad/constant.1) {allowzero=1}
        ReduceSum_y.grad/Expand.4: float32 4x1 [-, -] = Expand(ReduceSum_y.grad/Reshape.2,
                ReduceSum_y.grad/constant.3)
        MatMul_h.grad/Transpose.3: float32 2x4 [-, -] = Transpose(x) {perm=[1, 0]}
        MatMul_h.grad/MatMul.4: float32 2x1 [-, -] = MatMul(MatMul_h.grad/Transpose.3,
                ReduceSum_y.grad/Expand.4)
        loss: float32 scalar [] = Identity(y)
        w.grad: float32 2x1 [-, -] = Identity(MatMul_h.grad/MatMul.4)
        output loss: float32 scalar []
        output w.grad: float32 2x1 [-, -]
    """

    name: ClassVar[str] = "differentiate"
    loss: str = "softmax-cross-entropy"
    output: str = ""
    params: str = ""
    frozen: str = ""

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        if ctx.request.manual is not None:
            raise StrategyError("only `onnxpar grad` writes the training step of a manual program")
        request = StepRequest(
            self.loss,
            self.output or None,
            params=[self.params] if self.params else (),
            frozen=[self.frozen] if self.frozen else (),
        )
        back = add_backward(ctx.model, request)
        graph.outputs = []
        add_output(graph, back.loss, LOSS)
        for name, gradient in back.gradients.items():
            add_output(graph, gradient, f"{name}{GRADIENT}")
        graph.cleanup(remove_unused_graph_inputs=False)
        return True
