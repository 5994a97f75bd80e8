"""Caches of keys and values that are split along the sequence, for decoders in context-parallel.

Each rank holds the keys and values of some positions of a cache of fixed length. It writes those of
new tokens that belong there, and attends to what it holds; the ranks combine the results by the sum
of exponentials (log-sum-exp). Layers are split over the same ranks, as in Bhatia et al., "Helix
Parallelism" (2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.ir.tensors import is_float
from onnxpar.ir.training_spec import Step
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.model.interchange import is_weight
from onnxpar.sharding.factors import TensorFactors
from onnxpar.sharding.state import ShardingState


def cache_atoms(graph: gs.Graph, sharding: ShardingState, step: Step | None) -> frozenset[int]:
    """The atoms that number the positions of caches: dimensions of inputs of numbers with four
    dimensions over which a softmax is taken. Empty for a training step."""
    if step is not None:
        return frozenset()
    normalized = {
        leaf.atom
        for op in sharding.factors.ops
        for leaf in op.leaves
        if leaf.factor in op.rule.communicating
    }
    found = {leaf.atom for factors in _inputs(graph, sharding) for leaf in factors.leaves}
    return frozenset(found & normalized)


def cache_heads(
    graph: gs.Graph, sharding: ShardingState, positions: frozenset[int]
) -> frozenset[int]:
    """The atoms that number the heads of caches: those between the first and the last dimension
    that number no positions."""
    found: set[int] = set()
    for factors in _inputs(graph, sharding):
        if any(leaf.atom in positions for leaf in factors.leaves):
            pairs = zip(factors.leaves, factors.dim_of_leaf, strict=True)
            found |= {leaf.atom for leaf, dim in pairs if dim in (1, 2)}
    return frozenset(found - positions)


def _inputs(graph: gs.Graph, sharding: ShardingState) -> Iterator[TensorFactors]:
    """The factors of inputs of numbers with four dimensions."""
    for tensor in graph.inputs:
        factors = sharding.factors.tensors.get(tensor.name)
        is_fed = is_float(tensor) and not is_weight(tensor)
        if factors is not None and is_fed and len(factors.dims) == 4:
            yield factors


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
