"""localize-ops: turn the global program into a rank's program on shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import LAYOUTS, LOCAL, Pass, PassContext, Stage
from onnxpar.graph.collectives import DOMAIN, LOCAL_STEPS
from onnxpar.graph.origin import note_origin
from onnxpar.graph.reshards import is_reshard
from onnxpar.graph.subgraphs import subgraphs
from onnxpar.graph.tensors import tensor_shape
from onnxpar.lowering.localize import localize_node
from onnxpar.lowering.lower_bucket import BucketBuilder
from onnxpar.lowering.lower_reshard import ReshardBuilder
from onnxpar.lowering.unsigned_pairs import exchange_unsigned
from onnxpar.search.predict import predict_nodes
from onnxpar.sharding.planned_collectives import collective_of, inner_collective


@dataclass(frozen=True)
class LocalizeOps(Pass):
    """Rewrite every node for local shards, and every reshard into the runtime's collectives.

    Requires layouts of all tensors and no mismatch (insert-collectives). Ensures that shapes of
    inputs and outputs are rank 0's, that rank-dependent values are in `ctx.lowered.per_rank`, and
    that `ctx.lowered.collectives` lists the collectives in graph order.

    Example: shard(mesh="dp=2,tp=2", strategy={"shard": {"MatMul_h": [["dp", "tp"], ["tp", None]]}})

        flat (float[4,6] x, float[6,2] w) => (float[8] y) <int64[1] s = {8}>
        { h = MatMul(x, w)  y = Reshape(h, s) }

    Before:

        mesh dp=2,tp=2
        input  x: float32 4x6 [dp, tp]
        const  w: float32 6x2 [tp, -]
        const  s: int64 1 [-]
        h: float32 4x2 [dp, -] sum(tp) = MatMul(x, w)
        h@1: float32 4x2 [dp, -] = onnxpar.reshard.AllReduce(h) {axes=tp}
        y: float32 8 [dp] = Reshape(h@1, s)
        output y: float32 8 [dp]

    After:

        mesh dp=2,tp=2
        input  x: float32 2x3 [dp, tp]
        const  w: float32 6x2 [tp, -]
        const  Reshape_y::input1: int64 1 whole = [4]
        h: float32 4x2 [dp, -] sum(tp) = MatMul(x, w)
        h@1: float32 4x2 [dp, -] = onnxpar.AllReduce(h) {group=[0, 1]/rank, op=sum, tag=1}
        y: float32 4 [dp] = Reshape(h@1, Reshape_y::input1)
        output y: float32 4 [dp]
    """

    name: ClassVar[str] = "localize-ops"
    stage = Stage.LOWER
    requires = (LAYOUTS,)
    ensures = (LOCAL,)
    excludes = (LOCAL,)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        mesh = ctx.sharding.mesh
        factors = ctx.sharding.factors
        if len(ctx.sharding.costs.topology.levels) > 1 and ctx.choices.started is None:
            predicted = predict_nodes(graph.nodes, ctx.sharding)
            ctx.lowered.seconds = {name: times.compute for name, times in predicted.items()}
        for op in factors.ops:
            localize_node(op.graph, op, ctx.layouts, mesh, ctx.lowered.per_rank, factors.open_atoms)
        inner = [body.graph for op in ctx.sharding.factors.ops for body in op.bodies]
        for scope in [graph, *inner]:
            exchange_unsigned(scope)
        _lower_reshards(graph, ctx)
        for scope in [graph, *inner]:
            for tensor in [*scope.inputs, *scope.outputs]:
                if isinstance(tensor, gs.Variable) and tensor.name in ctx.layouts:
                    tensor.shape = list(ctx.layouts[tensor.name].local_shape(mesh, 0))
        ctx.lowered.localized = True
        return True


def _lower_reshards(graph: gs.Graph, ctx: PassContext, times: int = 1) -> None:
    """Replaces the reshard nodes of a graph and of its bodies by collectives and local nodes, in
    execution order, and lists the collectives for the plan. The graph runs `times` times in a run
    of the model."""
    mesh = ctx.sharding.mesh
    nodes: list[gs.Node] = []
    for node in list(graph.nodes):
        for body in subgraphs(node):
            _lower_reshards(body, ctx, times * _steps(node))
        if node.domain == DOMAIN:  # communication inside an op
            ctx.lowered.collectives.append(inner_collective(node, mesh).repeated(times))
            node.attrs["tag"] = len(ctx.lowered.collectives)
        if not is_reshard(node):
            nodes.append(node)
            continue
        if node.op not in LOCAL_STEPS:
            ctx.lowered.collectives.append(collective_of(node, mesh).repeated(times))
        tag = len(ctx.lowered.collectives)
        builder = BucketBuilder if len(node.inputs) > 1 else ReshardBuilder
        built = builder(node, mesh, ctx.lowered.per_rank, tag).build()
        note_origin(built, node.name)
        nodes += built
    graph.nodes = nodes


def _steps(node: gs.Node) -> int:
    """Returns the number of iterations of a Scan; 1 if it is unknown, and for any other node."""
    if node.op != "Scan":
        return 1
    axis = (node.attrs.get("scan_input_axes") or [0])[0]
    sequence = node.inputs[-node.attrs["num_scan_inputs"]]
    return (tensor_shape(sequence) or (1,) * (axis + 1))[axis] or 1
