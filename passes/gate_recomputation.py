"""gate-recomputation: what is computed again waits for the gradient that it is computed for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import ORDER, Pass, PassContext, Stage
from onnxpar.ir.collectives import DOMAIN
from onnxpar.ir.gates import gate_of
from onnxpar.ir.subgraphs import scopes


@dataclass(frozen=True)
class GateRecomputation(Pass):
    """Turn the Identities that frame a recomputation into gates, which hand a token on.

    In the global program they are Identities: onnxruntime would drop them, see that the same nodes
    are there twice, and keep the first results. Requires ordered collectives. Ensures that what is
    behind a gate starts once the gate's gradient is there; a gate talks to nobody.
    """

    name: ClassVar[str] = "gate-recomputation"
    stage = Stage.LOWER
    requires = (ORDER,)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        changed = False
        for each in (graph, *ctx.programs.values()):
            for scope in list(scopes(each)):
                changed |= _gate(scope)
        return changed


def _gate(scope: gs.Graph) -> bool:
    """The first node of a gate opens it, in graph order; others wait for it."""
    tokens: dict[str, gs.Tensor] = {}
    for node in scope.nodes:
        gate = gate_of(node)
        if gate is None:
            continue
        token = tokens.get(gate)
        if token is None:
            token = gs.Constant(f"{node.name}::token", np.zeros(0, np.bool_))
        node.op, node.domain = "Gate", DOMAIN
        node.inputs.append(token)
        result = gs.Variable(f"{node.name}::passed", np.bool_, [0])
        node.outputs.append(result)
        tokens.setdefault(gate, result)
    return bool(tokens)
