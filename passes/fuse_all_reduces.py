"""fuse-all-reduces: several all-reduces become one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.buckets import BUCKET_BYTES, first_of_buckets, fuse_all_reduces
from onnxpar.clone import needed
from onnxpar.flops import flops
from onnxpar.passes.pass_ import LAYOUTS, LOCAL, Pass, PassContext, Stage
from onnxpar.search.tensor_parallel import is_contraction

FUSIONS = ("size", "cost", "none")


@dataclass(frozen=True)
class FuseAllReduces(Pass):
    """Join all-reduces over the same ranks that do not wait for each other.

    Requires reshard nodes (insert-collectives); ensures the same, with fewer all-reduces.

    by            size: up to bucket_bytes together; cost: as many as computing hides; none
    bucket_bytes  bytes per rank of a bucket; with cost, no limit
    tail_us       microseconds that the last bucket may take, with cost
    """

    name: ClassVar[str] = "fuse-all-reduces"
    stage = Stage.LOWER
    requires = (LAYOUTS,)
    excludes = (LOCAL,)
    by: str = "size"
    bucket_bytes: int = BUCKET_BYTES
    tail_us: int = 1000

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        if self.by == "none":
            return False
        costs, sizes = ctx.sharding.costs, ctx.choices.bytes
        wanted = _wanted(graph, ctx)
        if self.by == "size":
            return fuse_all_reduces(graph, costs.mesh, self.bucket_bytes, sizes, wanted)
        ops = [op for op in ctx.sharding.factors.ops if is_contraction(op)]
        seconds = {op.node.name: costs.compute(flops(op, ctx.sharding), 0) for op in ops}
        first = first_of_buckets(graph, costs, seconds, self.tail_us * 1e-6, sizes, wanted)
        return fuse_all_reduces(graph, costs.mesh, sys.maxsize, sizes, wanted, first)


def _wanted(graph: gs.Graph, ctx: PassContext) -> dict[str, tuple[bool, bool]]:
    """Of each node, whether the step needs it, and whether its evaluation does, which is computed
    apart."""
    apart = set(ctx.model.step.evaluation) if ctx.model.step else set()
    if not apart:
        return {}
    names = [t.name for t in graph.outputs]
    groups = ([n for n in names if n not in apart], [n for n in names if n in apart])
    update, evaluation = ({n.name for n in needed(graph, group)} for group in groups)
    return {n.name: (n.name in update, n.name in evaluation) for n in graph.nodes}
