"""compact-experts: each expert computes the rows of its own tokens alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.compiler.pass_ import LOCAL, ORDER, Pass, PassContext, Stage
from onnxpar.ir.subgraphs import scopes
from onnxpar.lowering.chosen_rows import Compaction, find_chosen_rows


@dataclass(frozen=True)
class CompactExperts(Pass):
    """Replace the rows of zeros of a mixture of experts by a Scan over the rank's experts.

    The loader writes a mixture so that every expert has a row for each token: zeros for the tokens
    of other experts. The body of the Scan computes the rows that are not zeros. Requires local
    nodes. A mixture stays as it is if the ranks communicate between its nodes, or if a rank has no
    expert.

    Example: shard(mesh="ep=2", preset="expert-parallel")

        experts (float[3,2] x, bool[2,3,1] c, float[2,2,2] w) => (float[3,2] y) <float z = {0}> {
          a = Where(c, x, z)  b = MatMul(a, w)  d = Where(c, b, z)
          i = Constant <value_ints = [0]> ()  y = ReduceSum <keepdims = 0> (d, i) }

    Before:

    After:

    """

    name: ClassVar[str] = "compact-experts"
    stage = Stage.LOWER
    requires = (LOCAL,)
    excludes = (ORDER,)

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        changed = False
        mesh = ctx.sharding.mesh
        for scope in list(scopes(graph)):
            for found in list(find_chosen_rows(scope, ctx.layouts, mesh)):
                Compaction(scope, found, ctx.layouts, mesh, ctx.lowered.per_rank).replace()
                changed = True
        return changed
