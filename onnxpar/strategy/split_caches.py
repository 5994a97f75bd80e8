"""Caches of keys and values that are split along the sequence, for decoders in context-parallel.

Each rank holds the keys and values of some positions of a cache of fixed length. It writes those of
new tokens that belong there, and attends to what it holds; the ranks combine the results by the sum
of exponentials (log-sum-exp). Layers are split over the same ranks, as in Bhatia et al., "Helix
Parallelism" (2025).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.factors import TensorFactors
from onnxpar.sharding.state import ShardingState


def cache_atoms(sharding: ShardingState, states: Iterable[tuple[str, str]]) -> frozenset[int]:
    """The atoms that number the positions of caches: dimensions over which a softmax is taken, of
    `states`, (input, output) pairs with four dimensions. A cache that grows has none."""
    normalized = {
        leaf.atom
        for op in sharding.factors.ops
        for leaf in op.leaves
        if leaf.factor in op.rule.communicating
    }
    found: set[int] = set()
    for before, after in _caches(sharding, states):
        found |= _fixed(before, after)
    return frozenset(found & normalized)


def _fixed(before: TensorFactors, after: TensorFactors) -> set[int]:
    """The atoms of a state's dimensions that have the same size after a run."""
    same = {i for i, (a, b) in enumerate(zip(before.dims, after.dims, strict=True)) if a == b}
    pairs = zip(before.leaves, before.dim_of_leaf, strict=True)
    return {leaf.atom for leaf, dim in pairs if dim in same}


def cache_heads(
    sharding: ShardingState, states: Iterable[tuple[str, str]], positions: frozenset[int]
) -> frozenset[int]:
    """The atoms that number the heads of caches: those between the first and the last dimension
    that number no positions."""
    found: set[int] = set()
    for cache, _ in _caches(sharding, states):
        if any(leaf.atom in positions for leaf in cache.leaves):
            pairs = zip(cache.leaves, cache.dim_of_leaf, strict=True)
            found |= {leaf.atom for leaf, dim in pairs if dim in (1, 2)}
    return frozenset(found - positions)


def _caches(
    sharding: ShardingState, states: Iterable[tuple[str, str]]
) -> Iterator[tuple[TensorFactors, TensorFactors]]:
    """The factors of states with four dimensions, before and after a run."""
    tensors = sharding.factors.tensors
    for source, result in states:
        before, after = tensors.get(source), tensors.get(result)
        if before is not None and after is not None and len(before.dims) == len(after.dims) == 4:
            yield before, after


@dataclass(frozen=True)
class SplitCaches:
    """Splits the positions of caches, which the atoms in `positions` number, over the axes `over`,
    and their heads over other axes."""

    positions: frozenset[int]
    over: Axes
    heads: frozenset[int]
    axes: Axes

    def apply(self, sharding: ShardingState) -> bool:
        """Decides the open leaves of all nodes that write to caches or attend to them."""
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
