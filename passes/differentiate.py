"""differentiate: the gradients of a loss, appended to the global graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.errors import StrategyError
from onnxpar.ir.training_spec import GRADIENT
from onnxpar.training.backward import LOSS, LossOptions, add_backward, add_output


@dataclass(frozen=True)
class Differentiate(Pass):
    """Append the backward pass: an output NAME.grad for every weight that is trained.

    Requires a model that was loaded for training, before any layout is decided. Ensures that the
    graph has standard ONNX ops only, and trained weights are inputs with default values. `output`
    is what the loss is of, where the model has several outputs; `params` and `frozen` are globs.
    """

    name: ClassVar[str] = "differentiate"
    loss: str = "softmax-cross-entropy"
    output: str = ""
    params: str = ""
    frozen: str = ""

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        if ctx.manual is not None:
            raise StrategyError("a program per rank becomes a step by `onnxpar grad` alone")
        options = LossOptions(
            self.loss,
            self.output or None,
            params=[self.params] if self.params else (),
            frozen=[self.frozen] if self.frozen else (),
        )
        back = add_backward(ctx.model, options)
        graph.outputs = []
        add_output(graph, back.loss, LOSS)
        for name, gradient in back.gradients.items():
            add_output(graph, gradient, f"{name}{GRADIENT}")
        graph.cleanup(remove_unused_graph_inputs=False)
        return True
