"""fuse-all-reduces: join several collectives into one."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.pass_ import FUSED, LAYOUTS, LOCAL, Pass, PassContext, Stage
from onnxpar.graph.clone import needed, nodes_of_run
from onnxpar.graph.collectives import KINDS
from onnxpar.graph.reshards import is_reshard, reshard_of
from onnxpar.lowering.buckets import (
    BUCKET_BYTES,
    EXCHANGES,
    PART_BYTES,
    PARTS,
    REDUCTIONS,
    first_of_buckets,
    fuse_collectives,
    held_dim,
)
from onnxpar.lowering.compression import gradient_reductions
from onnxpar.search.predict import predict_nodes
from onnxpar.strategy.mindspore_keys import fusion_buckets

FUSIONS = ("size", "cost", "none")
INDEX = "index:"
"""What `by` starts with if the indices of gradients follow: index:20,35."""


def indices_of(by: str) -> tuple[int, ...]:
    """Returns the indices in `by`; none if that is another way. Errors: StrategyError."""
    if not by.startswith(INDEX):
        return ()
    parts = by.removeprefix(INDEX).split(",")
    found = tuple(int(part) for part in parts if part.strip().isdecimal())
    if len(found) < len(parts) or not found[0] or list(found) != sorted(set(found)):
        raise StrategyError(f"--fusion {by}: give rising whole numbers from 1, as {INDEX}20,35")
    return found


@dataclass(frozen=True)
class FuseAllReduces(Pass):
    """Join collectives of the same kind and ranks that do not wait for each other.

    Joins all-reduces, reduce-scatters and all-gathers, and the all-to-alls of tensors of which each
    is whole on one rank; while sizes are open, all-reduces and all-to-alls only.
    Requires reshard nodes (insert-collectives); ensures the same, with fewer collectives. Runs
    only once, as MindSpore's fusion does; `plan` says how many collectives it joined.

    by            size: up to so many bytes together; cost: so that the last one ends first, where
                  ranks compute meanwhile; none; index:20,35: the reductions of gradients before the
                  20th, then those before the 35th, then the rest, in the order in which they run
    bucket_bytes  most bytes per rank of all-reduces in a bucket
    shard_bytes   most bytes per rank of reduce-scatters and all-gathers in a bucket
    exchanges     true to join the all-to-alls, whatever `by` is

    Example: shard(mesh="tp=2", fusion="size", strategy={"tensors": {"x": [None, "tp"]}})

        two (float[4,6] x, float[6,3] w1, float[6,2] w2) => (float[4,3] y, float[4,2] z)
        { y = MatMul(x, w1)  z = MatMul(x, w2) }

    Before:

        mesh tp=2
        input  x: float32 4x6 [-, tp]
        const  w1: float32 6x3 [tp, -]
        const  w2: float32 6x2 [tp, -]
        y@1: float32 4x3 [-, -] sum(tp) = MatMul(x, w1)
        y: float32 4x3 [-, -] = onnxpar.reshard.AllReduce(y@1) {axes=tp}
        z@1: float32 4x2 [-, -] sum(tp) = MatMul(x, w2)
        z: float32 4x2 [-, -] = onnxpar.reshard.AllReduce(z@1) {axes=tp}
        output y: float32 4x3 [-, -]
        output z: float32 4x2 [-, -]

    After:

        mesh tp=2
        input  x: float32 4x6 [-, tp]
        const  w1: float32 6x3 [tp, -]
        const  w2: float32 6x2 [tp, -]
        y@1: float32 4x3 [-, -] sum(tp) = MatMul(x, w1)
        z@1: float32 4x2 [-, -] sum(tp) = MatMul(x, w2)
        y: float32 4x3 [-, -], z: float32 4x2 [-, -] = onnxpar.reshard.AllReduce(y@1, z@1) {axes=tp}
        output y: float32 4x3 [-, -]
        output z: float32 4x2 [-, -]
    """

    name: ClassVar[str] = "fuse-all-reduces"
    stage = Stage.LOWER
    requires = (LAYOUTS,)
    ensures = (FUSED,)
    excludes = (LOCAL, FUSED)
    costs_after = True
    by: str = "size"
    bucket_bytes: int = BUCKET_BYTES
    shard_bytes: int = PART_BYTES
    exchanges: bool = True

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        before = _counts(graph, ctx)
        buckets = _buckets(graph, ctx)
        changed = bool(buckets) and self._fuse_by_hand(graph, ctx, buckets)
        changed |= self.by != "none" and self._fuse(graph, ctx, buckets)
        changed |= self.exchanges and self._fuse_exchanges(graph, ctx)
        after = _counts(graph, ctx)
        ctx.fused = {kind: (count, after[kind]) for kind, count in before.items()}
        return changed

    def _fuse_by_hand(self, graph: gs.Graph, ctx: PassContext, buckets: Mapping[str, int]) -> bool:
        """Joins the reductions of gradients whose parameters the strategy puts into one bucket;
        those in bucket 0, and all others, stay apart."""
        own = _wanted(graph, ctx)
        found = {node.name: node.name for node in graph.nodes}
        numbered = {name: (own.get(name), bucket) for name, bucket in buckets.items() if bucket}
        mesh, sizes = ctx.sharding.mesh, ctx.choices.bytes
        return fuse_collectives(graph, mesh, sys.maxsize, sizes, {**found, **numbered})

    def _fuse(self, graph: gs.Graph, ctx: PassContext, apart: Collection[str]) -> bool:
        """Joins collectives as `by` says, except the nodes in `apart`."""
        costs, sizes = ctx.sharding.costs, ctx.choices.bytes
        wanted: Mapping[str, object] = {**_wanted(graph, ctx), **{n: n for n in apart}}
        first: set[str] = set()
        limit = self.bucket_bytes
        if self.by == "cost":
            each = predict_nodes(graph.nodes, ctx.sharding)
            seconds = {name: times.compute for name, times in each.items()}
            first = first_of_buckets(graph, costs, seconds, self._limit, sizes, wanted)
        indices = indices_of(self.by)
        if indices:
            wanted = _by_index(graph, ctx, indices, wanted)
            limit = sys.maxsize
        changed = fuse_collectives(graph, costs.mesh, limit, sizes, wanted, first)
        if ctx.model.sizes is None:  # shards of equal size may differ at other sizes
            limit = self.shard_bytes
            changed |= fuse_collectives(graph, costs.mesh, limit, sizes, wanted, first, PARTS)
        return changed

    def _limit(self, op: str) -> int:
        """The most bytes per rank of a bucket of this kind."""
        return self.bucket_bytes if op in REDUCTIONS else self.shard_bytes

    def _fuse_exchanges(self, graph: gs.Graph, ctx: PassContext) -> bool:
        """Joins the all-to-alls of tensors of which each is whole on one rank before or after it:
        together they are one exchange between all ranks."""
        wanted, atoms = _wanted(graph, ctx), _atoms_beside(graph, ctx)
        alike = {name: (wanted.get(name), own) for name, own in atoms.items()}
        mesh, sizes = ctx.sharding.mesh, ctx.choices.bytes
        return fuse_collectives(graph, mesh, self.bucket_bytes, sizes, alike, (), EXCHANGES)


def _counts(graph: gs.Graph, ctx: PassContext) -> Counter[str]:
    """Returns the number of collectives that may be fused, by kind, without those of a training
    step's evaluation."""
    step, kinds = ctx.model.step, (*REDUCTIONS, *EXCHANGES, *PARTS)
    nodes = nodes_of_run(graph, step.evaluation if step is not None else ())
    return Counter(node.op for node in nodes if is_reshard(node) and node.op in kinds)


def _atoms_beside(graph: gs.Graph, ctx: PassContext) -> dict[str, object]:
    """For each all-to-all that may be fused, the atoms of the dimensions other than the one that
    ranks at one coordinate hold: tensors with the same atoms have the same sizes there in any
    run."""
    found: dict[str, object] = {}
    for node in graph.nodes:
        if not is_reshard(node) or node.op not in EXCHANGES:
            continue
        held = held_dim(*reshard_of(node).members[0])
        names = [t.name for t in (*node.outputs, *node.inputs)]
        known = ctx.sharding.factors.tensors
        name = next((n for n in names if n in known), names[0].rpartition("@")[0])
        factors = known.get(name)
        if held is None or factors is None:
            found[node.name] = node.name
            continue
        pairs = zip(factors.leaves, factors.dim_of_leaf, strict=True)
        atoms = tuple((dim, leaf.atom) for leaf, dim in pairs if dim != held[0])
        found[node.name] = (len(factors.dims), atoms)
    return found


def _buckets(graph: gs.Graph, ctx: PassContext) -> dict[str, int]:
    """Returns the bucket of each reduction of a gradient for which the strategy gives one, by node.
    Errors: StrategyError."""
    shard = ctx.request.strategy.shard if ctx.request.strategy is not None else {}
    step = ctx.model.step
    found = fusion_buckets(shard, list(step.gradients) if step is not None else [])
    if step is None or not found:
        return {}
    of = gradient_reductions(graph, step.gradients)
    return {node: found[parameter] for node, parameter in of.items() if parameter in found}


def _by_index(
    graph: gs.Graph, ctx: PassContext, indices: Sequence[int], wanted: Mapping[str, object]
) -> Mapping[str, object]:
    """Adds to the purposes of collectives the bucket of each reduction of a gradient; any other
    reduction is alone. Errors: StrategyError if the model is no training step."""
    step = ctx.model.step
    if step is None:
        raise StrategyError(f"fuse-all-reduces: {INDEX} is for the gradients of a training step")
    of = gradient_reductions(graph, step.gradients)
    found = dict(wanted)
    number = 0
    for node in graph.nodes:
        if node.name in of:
            found[node.name] = (wanted.get(node.name), bisect_right(indices, number))
            number += 1
        elif is_reshard(node) and KINDS[node.op].reduces:
            found[node.name] = node.name
    return found


def _wanted(graph: gs.Graph, ctx: PassContext) -> dict[str, tuple[bool, bool]]:
    """For each node, two flags: whether the training step needs it, and whether its evaluation, a
    program of its own, needs it."""
    apart = set(ctx.model.step.evaluation) if ctx.model.step else set()
    if not apart:
        return {}
    names = [t.name for t in graph.outputs]
    groups = ([n for n in names if n not in apart], [n for n in names if n in apart])
    update, evaluation = ({n.name for n in needed(graph, group)} for group in groups)
    return {n.name: (n.name in update, n.name in evaluation) for n in graph.nodes}
