"""order-collectives: one total order of all collectives, over all groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.collective import DOMAIN
from onnxpar.passes.pass_ import Pass, PassContext


@dataclass(frozen=True)
class OrderCollectives(Pass):
    """Chain a token through the collectives in graph order.

    onnxruntime runs independent nodes in an order of its own, which changes with the graph; ranks
    that enter overlapping groups in different orders wait for each other for ever. The token is
    an empty tensor and costs nothing.
    """

    name: ClassVar[str] = "order-collectives"

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        token: gs.Tensor = gs.Constant("onnxpar.token", np.zeros(0, np.bool_))
        changed = False
        for node in graph.nodes:
            if node.domain == DOMAIN and len(node.inputs) == 1:
                passed = gs.Variable(f"{node.name}::token", np.bool_, [0])
                node.inputs.append(token)
                node.outputs.append(passed)
                token = passed
                changed = True
        ctx.ordered = True
        return changed
