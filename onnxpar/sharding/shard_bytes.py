"""Bytes of a tensor's shards: on one rank, on the rank with the largest shard, and on average."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.graph.reshards import operands_of, reshard_of
from onnxpar.graph.tensors import shape_bytes
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.sharding.state import FactorSharding, ShardingState


def shard_bytes(tensor: gs.Tensor, layout: Layout, mesh: Mesh, rank: int) -> int:
    """Returns the bytes of a rank's shard."""
    return shape_bytes(tensor, layout.estimated_shape(mesh, rank))


def largest_shard_bytes(tensor: gs.Tensor, layout: Layout) -> int:
    """Returns the bytes of the largest shard."""
    return shape_bytes(tensor, layout.largest_shape())


def reshard_bytes(node: gs.Node) -> int:
    """Returns the bytes of a reshard node's operands: for each operand, the larger of its largest
    shards before and after the reshard. Of rows of a mixture of experts, only the sent share
    counts."""
    whole = sum(
        max(largest_shard_bytes(tensor, layout) for layout in layouts)
        for tensor, *layouts in operands_of(node)
    )
    return round(whole * reshard_of(node).share)


def mean_bytes(
    tensor: gs.Tensor, factor_sharding: FactorSharding, sharding: ShardingState
) -> float:
    """Returns the bytes of a tensor's largest shard under `factor_sharding`, on average over the
    sizes at which costs are computed."""
    shapes = sharding.costed_shapes(tensor.name, factor_sharding)
    return sum(weight * shape_bytes(tensor, shape) for weight, shape in shapes)
