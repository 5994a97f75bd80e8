"""gate-recomputation: recomputed nodes wait for the gradient that needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import ORDER, Pass, PassContext, Stage
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.recomputation_gates import gate_of
from onnxpar.graph.subgraphs import scopes


@dataclass(frozen=True)
class GateRecomputation(Pass):
    """Turn the Identities around a recomputation into gates: nodes that wait for a token and pass
    it on.

    onnxruntime would remove Identities, find that each recomputed node equals the first one, and
    keep the first results in memory; it does not remove gates. Requires ordered collectives.
    Ensures that the nodes after a gate start once the gate's gradient is computed. A gate does not
    communicate with other ranks.

    Example: grad(loss="y", optimizer="none", recompute=True), shard(mesh="dp=1")

        block (float[4] x, float[4] w) => (float y)
        { p = Mul(x, w)  q = Exp(p)  r = Exp(q)  y = ReduceSumSquare<keepdims = 0>(r) }

    Before:

        mesh dp=1
        input  x: float32 4 [-]
        input  w: float32 4 [-]
        const  ReduceSumSquare_y.grad/Reshape.2: float32 1 [-]
        const  ReduceSumSquare_y.grad/constant.4: float32 scalar []
        p: float32 4 [-] = Mul(x, w)
        q: float32 4 [-] = Exp(p)
        r: float32 4 [-] = Exp(q)
        y: float32 scalar [] = ReduceSumSquare(r) {keepdims=0}
        ReduceSumSquare_y.grad/Mul.3: float32 4 [-] = Mul(ReduceSumSquare_y.grad/Reshape.2, r)
        ReduceSumSquare_y.grad/Mul.5: float32 4 [-] = Mul(ReduceSumSquare_y.grad/Mul.3,
                ReduceSumSquare_y.grad/constant.4)
        recompute/block.0/gradient: float32 4 [-] = Identity(ReduceSumSquare_y.grad/Mul.5)
        recompute/block.0/start: float32 4 [-] = Identity(p)
        recompute/block.0/q: float32 4 [-] = Exp(recompute/block.0/start)
        Exp_r.grad/Mul.1: float32 4 [-] = Mul(recompute/block.0/gradient, r)
        Exp_q.grad/Mul.1: float32 4 [-] = Mul(Exp_r.grad/Mul.1, recompute/block.0/q)
        Mul_p.grad/Mul.2: float32 4 [-] = Mul(Exp_q.grad/Mul.1, x)
        loss: float32 scalar [] = Identity(y)
        w.grad: float32 4 [-] = Identity(Mul_p.grad/Mul.2)
        output loss: float32 scalar []
        output w.grad: float32 4 [-]

    After:

        mesh dp=1
        input  x: float32 4 [-]
        input  w: float32 4 [-]
        const  ReduceSumSquare_y.grad/Reshape.2: float32 1 [-]
        const  ReduceSumSquare_y.grad/constant.4: float32 scalar []
        const  recompute/block.0/gradient::token: bool 0 whole = []
        p: float32 4 [-] = Mul(x, w)
        q: float32 4 [-] = Exp(p)
        r: float32 4 [-] = Exp(q)
        y: float32 scalar [] = ReduceSumSquare(r) {keepdims=0}
        ReduceSumSquare_y.grad/Mul.3: float32 4 [-] = Mul(ReduceSumSquare_y.grad/Reshape.2, r)
        ReduceSumSquare_y.grad/Mul.5: float32 4 [-] = Mul(ReduceSumSquare_y.grad/Mul.3,
                ReduceSumSquare_y.grad/constant.4)
        recompute/block.0/gradient: float32 4 [-], recompute/block.0/gradient::passed: bool 0 whole
                = onnxpar.Gate(ReduceSumSquare_y.grad/Mul.5, recompute/block.0/gradient::token)
        recompute/block.0/start: float32 4 [-], recompute/block.0/start::passed: bool 0 whole =
                onnxpar.Gate(p, recompute/block.0/gradient::passed)
        recompute/block.0/q: float32 4 [-] = Exp(recompute/block.0/start)
        Exp_r.grad/Mul.1: float32 4 [-] = Mul(recompute/block.0/gradient, r)
        Exp_q.grad/Mul.1: float32 4 [-] = Mul(Exp_r.grad/Mul.1, recompute/block.0/q)
        Mul_p.grad/Mul.2: float32 4 [-] = Mul(Exp_q.grad/Mul.1, x)
        loss: float32 scalar [] = Identity(y)
        w.grad: float32 4 [-] = Identity(Mul_p.grad/Mul.2)
        output loss: float32 scalar []
        output w.grad: float32 4 [-]
    """

    name: ClassVar[str] = "gate-recomputation"
    stage = Stage.LOWER
    requires = (ORDER,)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        changed = False
        for program in (graph, *ctx.lowered.programs.values()):
            for scope in list(scopes(program)):
                changed |= _gate(scope)
        return changed


def _gate(scope: gs.Graph) -> bool:
    """Turns the marked Identities of a graph or body into Gates. The first Gate of a recomputation
    gives a token, for which its other Gates wait. True if there was one."""
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
