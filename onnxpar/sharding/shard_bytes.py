"""Bytes of a tensor's shards."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.graph.reshards import operands_of, reshard_of
from onnxpar.graph.tensors import shape_bytes
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.sharding.state import FactorSharding, ShardingState


def shard_bytes(tensor: gs.Tensor, layout: Layout, mesh: Mesh, rank: int) -> int:
    """Bytes of a rank's shard."""
    return shape_bytes(tensor, layout.estimated_shape(mesh, rank))


def largest_shard_bytes(tensor: gs.Tensor, layout: Layout) -> int:
    """Bytes of the largest shard."""
    return shape_bytes(tensor, layout.largest_shape())


def reshard_bytes(node: gs.Node) -> int:
    """Bytes of a reshard node's operands: for each operand, the larger of its largest shards before
    and after the reshard; of rows for experts, only the share that is sent."""
    whole = sum(
        max(largest_shard_bytes(tensor, layout) for layout in layouts)
        for tensor, *layouts in operands_of(node)
    )
    return round(whole * reshard_of(node).share)


def mean_bytes(
    tensor: gs.Tensor, factor_sharding: FactorSharding, sharding: ShardingState
) -> float:
    """Bytes of a tensor's largest shard, on average over the sizes for which costs are computed."""
    shapes = sharding.costed_shapes(tensor.name, factor_sharding)
    return sum(weight * shape_bytes(tensor, shape) for weight, shape in shapes)
