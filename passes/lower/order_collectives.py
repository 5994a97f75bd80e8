"""order-collectives: put all collectives of all groups into one total order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import LOCAL, ORDER, Pass, PassContext, Stage
from onnxpar.graph.collectives import COMPLETE, DOMAIN, RANK_CONSTANTS
from onnxpar.graph.subgraphs import all_nodes, bodies

_TELL = ("AllToAllV", COMPLETE)
"""Ops whose tokens have more than one dimension: their sizes are information for profiles."""


@dataclass(frozen=True)
class OrderCollectives(Pass):
    """Chain a token through the collectives in graph order, through bodies too.

    onnxruntime chooses the order of independent nodes, and the choice changes with the graph. Ranks
    that enter overlapping groups in different orders deadlock. The token is an empty tensor and
    costs nothing.

    Requires rank-local nodes (localize-ops, or keep-collectives). Ensures that each collective
    reads the token of the collective before it.

    Example: shard(mesh="tp=2", strategy={"tensors": {"x": [None, "tp"]}})

        two (float[4,6] x, float[6,3] w1, float[6,2] w2) => (float[4,3] y, float[4,2] z)
        { y = MatMul(x, w1)  z = MatMul(x, w2) }

    Before:

        mesh tp=2
        input  x: float32 4x3 [-, tp]
        const  w1: float32 6x3 [tp, -]
        const  w2: float32 6x2 [tp, -]
        y@1: float32 4x3 [-, -] sum(tp) = MatMul(x, w1)
        y: float32 4x3 [-, -] = onnxpar.AllReduce(y@1) {group=[0, 1]/rank, op=sum, tag=1}
        z@1: float32 4x2 [-, -] sum(tp) = MatMul(x, w2)
        z: float32 4x2 [-, -] = onnxpar.AllReduce(z@1) {group=[0, 1]/rank, op=sum, tag=2}
        output y: float32 4x3 [-, -]
        output z: float32 4x2 [-, -]

    After:

        mesh tp=2
        input  x: float32 4x3 [-, tp]
        const  w1: float32 6x3 [tp, -]
        const  onnxpar.token: bool 0 whole = []
        const  w2: float32 6x2 [tp, -]
        y@1: float32 4x3 [-, -] sum(tp) = MatMul(x, w1)
        y: float32 4x3 [-, -], AllReduce_y::token: bool 0 whole = onnxpar.AllReduce(y@1,
                onnxpar.token) {group=[0, 1]/rank, op=sum, tag=1}
        z@1: float32 4x2 [-, -] sum(tp) = MatMul(x, w2)
        z: float32 4x2 [-, -], AllReduce_z::token: bool 0 whole = onnxpar.AllReduce(z@1,
                AllReduce_y::token) {group=[0, 1]/rank, op=sum, tag=2}
        output y: float32 4x3 [-, -]
        output z: float32 4x2 [-, -]
    """

    name: ClassVar[str] = "order-collectives"
    stage = Stage.LOWER
    requires = (LOCAL,)
    ensures = (ORDER,)
    excludes = (ORDER,)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        token: gs.Tensor = gs.Constant(ctx.model.names.free("onnxpar.token"), np.zeros(0, np.bool_))
        ctx.lowered.ordered = True
        last = [_thread(program, token) for program in (graph, *ctx.lowered.programs.values())]
        return any(end is not token for end in last)


def _thread(graph: gs.Graph, token: gs.Tensor) -> gs.Tensor:
    """Passes the token from collective to collective of a graph. Returns the token of the last
    collective, or the token itself if there is none."""
    for node in graph.nodes:
        if node.domain == DOMAIN and node.op not in RANK_CONSTANTS:
            node.inputs.append(token)
            token = _token(node.name, node.op)
            node.outputs.append(token)
        elif any(n.domain == DOMAIN for body in bodies(node) for n in all_nodes(body)):
            token = _thread_branches(node, token) if node.op == "If" else _carry(node, token)
    return token


def _thread_branches(node: gs.Node, token: gs.Tensor) -> gs.Tensor:
    """Makes both branches of an If return a token, even a branch without collectives. Returns the
    If's token."""
    for key in ("then_branch", "else_branch"):
        branch = node.attrs[key]
        last = _thread(branch, token)
        if last is token:
            last = _token(f"{node.name}::{key}")
            branch.nodes.append(gs.Node("Identity", last.name, {}, [token], [last]))
        branch.outputs.append(last)
    node.outputs.append(_token(node.name))
    return node.outputs[-1]


def _carry(node: gs.Node, token: gs.Tensor) -> gs.Tensor:
    """Adds the token to the values that a Loop or Scan carries, as the last one. Returns the node's
    token."""
    (body,) = bodies(node)
    first, back = (
        (2, 1) if node.op == "Loop" else (0, 0)
    )  # the body first gets a counter and a condition, and first returns a condition
    carried = len(body.inputs) - first - node.attrs.get("num_scan_inputs", 0)
    inner = _token(f"{node.name}::carried")
    node.inputs.insert(first + carried, token)
    body.inputs.insert(first + carried, inner)
    body.outputs.insert(back + carried, _thread(body, inner))
    node.outputs.insert(carried, _token(node.name))
    return node.outputs[carried]


def _token(name: str, op: str = "") -> gs.Variable:
    """Returns a new token of a node. The shape is open for ops of `_TELL`, else [0]."""
    return gs.Variable(f"{name}::token", np.bool_, None if op in _TELL else [0])
