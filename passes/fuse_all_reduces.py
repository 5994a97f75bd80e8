"""fuse-all-reduces: several collectives become one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import LAYOUTS, LOCAL, Pass, PassContext, Stage
from onnxpar.ir.clone import needed
from onnxpar.lowering.buckets import (
    BUCKET_BYTES,
    PART_BYTES,
    PARTS,
    first_of_buckets,
    fuse_collectives,
)
from onnxpar.presets.tensor_parallel import is_contraction
from onnxpar.sharding.flops import flops

FUSIONS = ("size", "cost", "none")


@dataclass(frozen=True)
class FuseAllReduces(Pass):
    """Join all-reduces, reduce-scatters and all-gathers over the same ranks that do not wait for
    each other; while sizes are open, all-reduces only.

    Requires reshard nodes (insert-collectives); ensures the same, with fewer collectives.

    by            size: up to so many bytes together; cost: as many as computing hides; none
    bucket_bytes  bytes per rank of all-reduces in a bucket; with cost, no limit
    part_bytes    the same of reduce-scatters and all-gathers, with cost, too
    tail_us       microseconds that the last bucket may take, with cost
    """

    name: ClassVar[str] = "fuse-all-reduces"
    stage = Stage.LOWER
    requires = (LAYOUTS,)
    excludes = (LOCAL,)
    by: str = "size"
    bucket_bytes: int = BUCKET_BYTES
    shard_bytes: int = PART_BYTES
    tail_us: int = 1000

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        if self.by == "none":
            return False
        costs, sizes = ctx.sharding.costs, ctx.choices.bytes
        wanted = _wanted(graph, ctx)
        first: set[str] = set()
        limit = self.bucket_bytes
        if self.by == "cost":
            ops = [op for op in ctx.sharding.factors.ops if is_contraction(op)]
            seconds = {op.node.name: costs.compute(flops(op, ctx.sharding), 0) for op in ops}
            first = first_of_buckets(graph, costs, seconds, self.tail_us * 1e-6, sizes, wanted)
            limit = sys.maxsize
        changed = fuse_collectives(graph, costs.mesh, limit, sizes, wanted, first)
        if ctx.model.sizes is None:  # parts that are equal at one size may not be at another
            limit = self.shard_bytes
            changed |= fuse_collectives(graph, costs.mesh, limit, sizes, wanted, first, PARTS)
        return changed


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
