"""Counts floating-point operations of contractions (MatMul, Gemm, Conv, Einsum), whole or split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from onnxpar.graph.tensors import Size
from onnxpar.layout.layout import estimated_size, largest_size
from onnxpar.layout.mesh import Axes
from onnxpar.rules.notation import expr_vars
from onnxpar.rules.rule import Rule
from onnxpar.sharding.factors import OpFactors, with_axes
from onnxpar.sharding.state import ShardingState


def flops(op: OpFactors, sharding: ShardingState | None = None) -> int:
    """Returns the multiplications and additions of a contraction. Without `sharding`, of the
    unsplit op; with it, of the rank with the largest shards."""
    if sharding is None:
        whole: Axes = ()
        return _count(op, op.rule.sizes, [whole] * len(op.leaves))
    return flops_over(op, sharding.op_axes(op), sharding)


def flops_of_ranks(op: OpFactors, sharding: ShardingState, ranks: Sequence[int]) -> list[int]:
    """Returns the multiplications and additions of a contraction on each of `ranks`, in order."""
    axes = without_rings(op, sharding.op_axes(op))
    sizes_by_factor: dict[str, list[int]] = {}
    for name in op.rule.sizes.keys() - op.whole.keys():
        at = [(i, leaf) for i, leaf in enumerate(op.leaves) if leaf.factor == name]
        over = [(axes[i], sharding.parts_of(leaf.atom, axes[i])) for i, leaf in at]
        if any(split for split, _ in over):
            tree = with_axes(op.trees[name], iter(over))
            sizes_by_factor[name] = [estimated_size(tree, sharding.mesh, rank) for rank in ranks]
    counts: dict[tuple[int, ...], int] = {}
    flops_by_rank = []
    for sizes in (
        zip(*sizes_by_factor.values(), strict=True) if sizes_by_factor else [()] * len(ranks)
    ):
        if sizes not in counts:
            local = {**op.rule.sizes, **dict(zip(sizes_by_factor, sizes, strict=True))}
            counts[sizes] = _count(op, local, axes)
        flops_by_rank.append(counts[sizes])
    return flops_by_rank


def flops_over(
    op: OpFactors, axes: Sequence[Axes], sharding: ShardingState, rank: int | None = None
) -> int:
    """Returns the multiplications and additions of a contraction on a rank if the node's leaves
    (parts of dimensions) are split over `axes` (axes of each leaf). Without `rank`, of the rank
    with the largest shards."""
    sizes = dict(op.rule.sizes)
    axes = without_rings(op, axes)
    for name in sizes.keys() - op.whole.keys():
        over = [
            (axes[i], sharding.parts_of(leaf.atom, axes[i]))
            for i, leaf in enumerate(op.leaves)
            if leaf.factor == name
        ]
        tree = with_axes(op.trees[name], iter(over))
        if rank is None:
            sizes[name] = largest_size(tree)
        else:
            sizes[name] = estimated_size(tree, sharding.mesh, rank)
    return _count(op, sizes, axes)


def _count(op: OpFactors, sizes: Mapping[str, Size], axes: Sequence[Axes]) -> int:
    """Returns the multiplications and additions for factors of these sizes. For a mixture of
    experts, only the chosen rows count."""
    return round(2 * _products(op.rule, sizes) * op.computed(axes))


def without_rings(op: OpFactors, axes: Sequence[Axes]) -> list[Axes]:
    """Returns the axes of each leaf (a part of a dimension) of a node, with no axes for a leaf
    whose shards travel in a ring: a rank computes with all of that leaf's shards, one after the
    other."""
    remaining = list(axes)
    for i, j in op.rings:
        if axes[i] == axes[j]:
            remaining[j] = ()
    return remaining


def _products(rule: Rule, sizes: Mapping[str, Size]) -> int:
    """Returns the number of multiplications of a contraction with factors of these sizes: m * k * n
    for `m k, k n -> m n`. A convolution relates each position of the larger image to few positions
    of the smaller one, so only the positions of the smaller image count."""
    if rule.ranks.products is not None:
        return rule.ranks.products(sizes)
    operands = [{v for expr in spec or () for v in expr_vars(expr)} for spec in rule.inputs[:2]]
    result = {v for expr in rule.outputs[0] or () for v in expr_vars(expr)}
    counts = (operands[0] | operands[-1], result | operands[-1] | rule.reduce.keys())
    return min(
        math.prod(1 if sizes[v] is None else sizes[v] or 0 for v in variables)
        for variables in counts
    )
