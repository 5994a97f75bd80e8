"""The costs of summing gradients over ranks, where several sums are fused into one all-reduce
(a bucket)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxpar.cost.cost import Costs, hidden_hosts
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.graph.tensors import element_bytes, tensor_shape
from onnxpar.graph.training_spec import Step
from onnxpar.layout.mesh import Axes
from onnxpar.lowering.buckets import BUCKET_BYTES
from onnxpar.lowering.compression import gradient_tensors
from onnxpar.sharding.state import ShardingState


@dataclass(frozen=True)
class BucketCosts(Costs):
    """A cost model in which an all-reduce of less than `bucket` bytes costs its share of an
    all-reduce of `bucket` bytes, because it will be fused with others."""

    bucket: float = 0.0

    def step(self, kind: str, axes: Axes, size: float) -> float:
        """Returns the seconds of one step of a reshard, e.g. an AllReduce of `size` bytes over
        these axes."""
        if kind == "AllReduce" and size < self.bucket:
            return self.collective(kind, axes, self.bucket) * size / self.bucket
        return super().step(kind, axes, size)


@dataclass(frozen=True)
class GradientSums:
    """Which tensors are gradients whose sums over ranks are fused, and what these sums cost.

    tensors  the names of these tensors
    costs    the cost model for their reshards; None without a training step
    """

    tensors: frozenset[str] = frozenset()
    costs: Costs | None = None

    @classmethod
    def of(
        cls, graph: gs.Graph, step: Step | None, costs: Costs, are_hidden: bool = False
    ) -> GradientSums:
        """Returns the gradient sums of a training step; none if `step` is None. The costs are the
        costs of full buckets, or of one smaller bucket for all gradients. If `are_hidden`, sums
        between hosts cost as little as sums within a host, because compute hides the difference."""
        if step is None:
            return cls()
        ends = set(step.gradients.values())
        produced = {t.name: t for node in all_nodes(graph) for t in node.outputs if t.name in ends}
        total = sum(
            math.prod(size or 1 for size in tensor_shape(t) or ()) * element_bytes(t)
            for t in produced.values()
        )
        bucket = min(total, BUCKET_BYTES)
        names = frozenset(gradient_tensors(graph, step.gradients))
        topology = hidden_hosts(costs.topology) if are_hidden else costs.topology
        return cls(names, BucketCosts(topology, costs.mesh, bucket=bucket))

    def within(self, sharding: ShardingState, tensor: str) -> ShardingState:
        """Returns the sharding state with the cost model that applies to reshards of this
        tensor."""
        if tensor not in self.tensors or self.costs is None:
            return sharding
        return replace(sharding, costs=self.costs)
