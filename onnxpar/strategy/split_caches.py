"""Splits caches of keys and values along the sequence, for decoders in context-parallel.

Each rank holds the keys and values of some positions of a cache of fixed length. It writes the keys
and values of new tokens with these positions, and attends to the positions that it holds; the ranks
combine the results by the sum of exponentials (log-sum-exp). Layers are split over the same ranks,
as in Bhatia et al., "Helix Parallelism" (2025).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.factors import TensorFactors
from onnxpar.sharding.state import ShardingState


def cache_atoms(sharding: ShardingState, states: Iterable[tuple[str, str]]) -> frozenset[int]:
    """Returns the atoms (parts of dimensions) that number the positions of caches. A cache is a
    state pair (input, output that is its next value) with four dimensions; its positions are a
    dimension over which a softmax is taken. A cache that grows from run to run has no such atom."""
    normalized = {
        leaf.atom
        for op in sharding.factors.ops
        for leaf in op.leaves
        if leaf.factor in op.rule.communicating
    }
    fixed: set[int] = set()
    for before, after in _caches(sharding, states):
        fixed |= _fixed(before, after)
    return frozenset(fixed & normalized)


def _fixed(before: TensorFactors, after: TensorFactors) -> set[int]:
    """Returns the atoms (parts of dimensions) of a state's dimensions whose size a run does not
    change."""
    same = {i for i, (a, b) in enumerate(zip(before.dims, after.dims, strict=True)) if a == b}
    pairs = zip(before.leaves, before.dim_of_leaf, strict=True)
    return {leaf.atom for leaf, dim in pairs if dim in same}


def cache_heads(
    sharding: ShardingState, states: Iterable[tuple[str, str]], positions: frozenset[int]
) -> frozenset[int]:
    """Returns the atoms (parts of dimensions) that number the heads of caches: the atoms of the two
    middle dimensions that do not number positions. `positions` is the result of `cache_atoms`."""
    middle: set[int] = set()
    for cache, _ in _caches(sharding, states):
        if any(leaf.atom in positions for leaf in cache.leaves):
            pairs = zip(cache.leaves, cache.dim_of_leaf, strict=True)
            middle |= {leaf.atom for leaf, dim in pairs if dim in (1, 2)}
    return frozenset(middle - positions)


def _caches(
    sharding: ShardingState, states: Iterable[tuple[str, str]]
) -> Iterator[tuple[TensorFactors, TensorFactors]]:
    """Yields the factors of each state with four dimensions, before and after a run."""
    tensors = sharding.factors.tensors
    for source, result in states:
        before, after = tensors.get(source), tensors.get(result)
        if before is not None and after is not None and len(before.dims) == len(after.dims) == 4:
            yield before, after


@dataclass(frozen=True)
class SplitCaches:
    """The annotation that splits caches of keys and values.

    positions  the atoms (parts of dimensions) of positions, which are split over the axes `over`
    heads      the atoms of heads, which are split over `axes`
    """

    positions: frozenset[int]
    over: Axes
    heads: frozenset[int]
    axes: Axes

    def apply(self, sharding: ShardingState) -> bool:
        """Splits the undecided leaves (parts of dimensions) of positions and heads, in all nodes
        that write to caches or attend to them. True if a leaf was split."""
        changed = False
        for op in sharding.factors.ops:
            atoms = [leaf.atom for leaf in op.leaves]
            if self.positions.isdisjoint(atoms):
                continue
            for i, atom in enumerate(atoms):
                if atom in self.positions:
                    changed |= sharding.assign_op(op, i, self.over)
                elif atom in self.heads and op.leaves[i].size >= parts_over(self.axes):
                    changed |= sharding.assign_op(op, i, self.axes)
        return changed
