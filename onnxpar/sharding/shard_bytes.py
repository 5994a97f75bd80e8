"""Bytes of a tensor's shards."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.ir.reshards import operands_of
from onnxpar.ir.tensors import shape_bytes
from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Mesh
from onnxpar.sharding.state import FactorSharding, ShardingState


def shard_bytes(tensor: gs.Tensor, layout: Layout, mesh: Mesh, rank: int = 0) -> int:
    """Bytes of a rank's shard; with default sizes, rank 0 has the largest."""
    return shape_bytes(tensor, layout.estimated_shape(mesh, rank))


def reshard_bytes(node: gs.Node, mesh: Mesh) -> int:
    """Bytes of the shards of a reshard node's operands, each before or after it, as is larger."""
    return sum(
        max(shard_bytes(tensor, layout, mesh) for layout in layouts)
        for tensor, *layouts in operands_of(node)
    )


def mean_bytes(
    tensor: gs.Tensor, factor_sharding: FactorSharding, sharding: ShardingState
) -> float:
    """Bytes of a tensor's largest shard, on average over the sizes for which costs are computed."""
    each = sharding.costed_shapes(tensor.name, factor_sharding)
    return sum(weight * shape_bytes(tensor, shape) for weight, shape in each)
