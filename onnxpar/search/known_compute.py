"""The costs of a node under its strategies, each computed once. A cost that does not depend on the
mesh serves all strategies and meshes that split the node's leaves into as many shards."""

from __future__ import annotations

from collections.abc import Hashable

from onnxpar.search.op_cost import op_cost
from onnxpar.search.op_strategies import OpStrategy
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState


class KnownCompute:
    """Computes the costs of one node, and of all with the same signature.

    op        the node
    sharding  the mesh and its cost model
    sign      the number of the node's signature
    known     costs from other meshes, to which this adds
    """

    def __init__(
        self,
        op: OpFactors,
        sharding: ShardingState,
        sign: int,
        known: dict[Hashable, tuple[float, float]],
    ) -> None:
        self.op, self.sharding = op, sharding
        self.sign, self.known = sign, known
        topology = sharding.costs.topology
        is_uneven = bool(topology.devices or topology.shares or sharding.parts)
        self._depends = is_uneven or bool(op.rings or op.bodies)
        between = {*op.rule.communicating, *op.rule.ranks.lowered}
        self._between = [i for i, leaf in enumerate(op.leaves) if leaf.factor in between]

    def cost(self, strategy: OpStrategy) -> tuple[float, float]:
        """Returns (seconds of compute, seconds of communication inside the node) under a strategy,
        as `op_cost`."""
        sizes = self._sizes(strategy)
        if sizes is None:
            return op_cost(self.op, strategy, self.sharding)
        key = self.sign, sizes
        if key not in self.known:
            self.known[key] = op_cost(self.op, strategy, self.sharding)
        return self.known[key]

    def _sizes(self, strategy: OpStrategy) -> Hashable | None:
        """Returns, for each splittable part of the node's dimensions (leaf), the sizes of the axes
        that split it, if the node's cost depends on nothing else; None if it does, because ranks
        differ, or communicate inside the node."""
        axes = strategy.axes
        if self._depends or any(axes[i] for i in self._between):
            return None
        if any(axis.at is not None for over in axes for axis in over):
            return None
        return tuple([tuple([axis.size for axis in over]) for over in axes])
