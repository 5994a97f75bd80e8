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
"""The prefix of `by` before indices of gradients: index:20,35."""


def indices_of(by: str) -> tuple[int, ...]:
    """Returns the indices of gradients in the option `by`: (20, 35) for "index:20,35"; () if `by`
    has another form. Errors: StrategyError."""
    if not by.startswith(INDEX):
        return ()
    parts = by.removeprefix(INDEX).split(",")
    indices = tuple(int(part) for part in parts if part.strip().isdecimal())
    if len(indices) < len(parts) or not indices[0] or list(indices) != sorted(set(indices)):
        raise StrategyError(f"--fusion {by}: give rising whole numbers from 1, as {INDEX}20,35")
    return indices


@dataclass(frozen=True)
class FuseAllReduces(Pass):
    """Join collectives of the same kind and ranks that do not wait for each other.

    Joins all-reduces, reduce-scatters, all-gathers, and all-to-alls if one rank holds each tensor
    whole, before or after; with open sizes, only all-reduces and all-to-alls. Requires reshard
    nodes (insert-collectives). Ensures that all layouts still agree, with fewer collectives. Runs
    only once, as MindSpore's fusion does; `plan` says how many collectives the pass joined.

    by            size: up to the bytes below; cost: up to the bytes below, so that the last
                  collective ends as early as possible beside compute; none; index:20,35: three
                  buckets of reductions of gradients: the first 20, the next 15, and the others, in
                  execution order
    bucket_bytes  most bytes per rank of all-reduces in a bucket
    shard_bytes   most bytes per rank of reduce-scatters and all-gathers in a bucket
    exchanges     true to join all-to-alls, whatever `by` is

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
        """Joins the reductions of gradients whose parameters the strategy puts into one bucket.
        Reductions in bucket 0 and all other collectives stay single. True if any were joined.

        buckets  the number of the bucket of each reduction, by name
        """
        purposes = _purposes(graph, ctx)
        single = {node.name: node.name for node in graph.nodes}
        numbered = {name: (purposes.get(name), at) for name, at in buckets.items() if at}
        mesh, sizes = ctx.sharding.mesh, ctx.choices.bytes
        return fuse_collectives(graph, mesh, sys.maxsize, sizes, {**single, **numbered})

    def _fuse(self, graph: gs.Graph, ctx: PassContext, apart: Collection[str]) -> bool:
        """Joins collectives as the option `by` says, except the nodes named in `apart`. True if any
        were joined."""
        costs, sizes = ctx.sharding.costs, ctx.choices.bytes
        purposes: Mapping[str, object] = {**_purposes(graph, ctx), **{n: n for n in apart}}
        first: set[str] = set()
        limit = self.bucket_bytes
        if self.by == "cost":
            times_by_node = predict_nodes(graph.nodes, ctx.sharding)
            seconds = {name: times.compute for name, times in times_by_node.items()}
            first = first_of_buckets(graph, costs, seconds, self._limit, sizes, purposes)
        indices = indices_of(self.by)
        if indices:
            purposes = _by_index(graph, ctx, indices, purposes)
            limit = sys.maxsize
        changed = fuse_collectives(graph, costs.mesh, limit, sizes, purposes, first)
        if ctx.model.sizes is None:  # shards of equal size may differ at other sizes
            limit = self.shard_bytes
            changed |= fuse_collectives(graph, costs.mesh, limit, sizes, purposes, first, PARTS)
        return changed

    def _limit(self, op: str) -> int:
        """Returns the most bytes per rank of a bucket of this kind of collective."""
        return self.bucket_bytes if op in REDUCTIONS else self.shard_bytes

    def _fuse_exchanges(self, graph: gs.Graph, ctx: PassContext) -> bool:
        """Joins all-to-alls that each move a split dimension to the ranks at one coordinate of an
        axis, or back (table-parallel). The coordinate may differ by tensor, so that together they
        are one exchange. True if any were joined."""
        purposes, atoms = _purposes(graph, ctx), _atoms_beside(graph, ctx)
        alike = {name: (purposes.get(name), own) for name, own in atoms.items()}
        mesh, sizes = ctx.sharding.mesh, ctx.choices.bytes
        return fuse_collectives(graph, mesh, self.bucket_bytes, sizes, alike, (), EXCHANGES)


def _counts(graph: gs.Graph, ctx: PassContext) -> Counter[str]:
    """Returns the number of fusable collectives by kind, without the collectives of a training
    step's evaluation."""
    step, kinds = ctx.model.step, (*REDUCTIONS, *EXCHANGES, *PARTS)
    nodes = nodes_of_run(graph, step.evaluation if step is not None else ())
    return Counter(node.op for node in nodes if is_reshard(node) and node.op in kinds)


def _atoms_beside(graph: gs.Graph, ctx: PassContext) -> dict[str, object]:
    """For each fusable all-to-all, returns the atoms (parts of dimensions) of all dimensions except
    the dimension that ranks at one coordinate hold. Tensors with equal atoms have equal sizes in
    these dimensions in every run."""
    atoms_by_node: dict[str, object] = {}
    for node in graph.nodes:
        if not is_reshard(node) or node.op not in EXCHANGES:
            continue
        held = held_dim(*reshard_of(node).members[0])
        names = [t.name for t in (*node.outputs, *node.inputs)]
        tensors = ctx.sharding.factors.tensors
        name = next((n for n in names if n in tensors), names[0].rpartition("@")[0])
        factors = tensors.get(name)
        if held is None or factors is None:
            atoms_by_node[node.name] = node.name
            continue
        pairs = zip(factors.leaves, factors.dim_of_leaf, strict=True)
        atoms = tuple((dim, leaf.atom) for leaf, dim in pairs if dim != held[0])
        atoms_by_node[node.name] = (len(factors.dims), atoms)
    return atoms_by_node


def _buckets(graph: gs.Graph, ctx: PassContext) -> dict[str, int]:
    """Returns the bucket that the strategy gives to each reduction of a gradient, by name of the
    node. Errors: StrategyError."""
    shard = ctx.request.strategy.shard if ctx.request.strategy is not None else {}
    step = ctx.model.step
    by_parameter = fusion_buckets(shard, list(step.gradients) if step is not None else [])
    if step is None or not by_parameter:
        return {}
    of = gradient_reductions(graph, step.gradients)
    return {
        node: by_parameter[parameter] for node, parameter in of.items() if parameter in by_parameter
    }


def _by_index(
    graph: gs.Graph, ctx: PassContext, indices: Sequence[int], purposes: Mapping[str, object]
) -> Mapping[str, object]:
    """Returns `purposes` with a bucket for each reduction of a gradient, by its index in execution
    order; each other reduction gets a bucket of its own. Errors: StrategyError if the model is no
    training step."""
    step = ctx.model.step
    if step is None:
        raise StrategyError(f"fuse-all-reduces: {INDEX} is for the gradients of a training step")
    of = gradient_reductions(graph, step.gradients)
    by_node = dict(purposes)
    number = 0
    for node in graph.nodes:
        if node.name in of:
            by_node[node.name] = (purposes.get(node.name), bisect_right(indices, number))
            number += 1
        elif is_reshard(node) and KINDS[node.op].reduces:
            by_node[node.name] = node.name
    return by_node


def _purposes(graph: gs.Graph, ctx: PassContext) -> dict[str, tuple[bool, bool]]:
    """Returns for each node (True if the training step needs it, True if the evaluation needs it).
    Only collectives with equal purposes are joined, as the evaluation is a separate program."""
    apart = set(ctx.model.step.evaluation) if ctx.model.step else set()
    if not apart:
        return {}
    names = [t.name for t in graph.outputs]
    groups = ([n for n in names if n not in apart], [n for n in names if n in apart])
    update, evaluation = ({n.name for n in needed(graph, group)} for group in groups)
    return {n.name: (n.name in update, n.name in evaluation) for n in graph.nodes}
