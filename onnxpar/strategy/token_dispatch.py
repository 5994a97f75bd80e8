"""Decides how the tokens of a mixture reach the ranks of their experts: each rank gathers all
tokens, or ranks exchange rows, and each token reaches only the ranks of its own experts.

Megatron-LM names the two dispatchers `allgather` and `alltoall`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_graphsurgeon as gs

from onnxpar.layout.layout import default_parts
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.expert_rows import ExpertRows
from onnxpar.sharding.mixtures import ExpertPart
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState

_COUNT_BYTES = 8
_LAUNCHES = 30
"""The number of additional nodes that a rank runs to sort the rows that it sends and receives."""


def exchanged_parts(sharding: ShardingState, over: Axes, beside: Axes) -> Iterator[ExpertPart]:
    """Yields the part of experts in each mixture for which the exchange of rows is cheaper.

    over    the axes that split experts
    beside  the other axes, which split tokens
    """
    for mixture in sharding.factors.mixtures:
        rows, part, share = mixture.rows, mixture.part, mixture.share
        if part is None or share is None:
            continue
        experts = sharding.factors.tensors[rows.chosen.name].dims[0].size
        if not min(default_parts(experts, over)):
            continue
        moved = [share * _bytes(tensor, sharding) for tensor in mixture.moved]
        gathered = _gather(rows, share, sharding, over, beside)
        if _exchange(moved, experts, sharding, over, beside) < gathered:
            yield part


def _exchange(
    moved: Sequence[float], experts: int, sharding: ShardingState, over: Axes, beside: Axes
) -> float:
    """Seconds of the exchange: the chosen rows, of `moved` bytes, go there and back, after their
    numbers."""
    ranks, costs = parts_over(over) * parts_over(beside), sharding.costs
    sizes = [*(size / ranks for size in moved), _COUNT_BYTES * experts]
    launches = _LAUNCHES * max(device.launch for device in costs.devices)
    return sum(costs.collective("AllToAll", over, size) for size in sizes) + launches


def _gather(
    rows: ExpertRows, share: float, sharding: ShardingState, over: Axes, beside: Axes
) -> float:
    """Seconds in which each rank gathers all tokens, and ranks add up the results. If other axes
    split the batch, every rank along `over` has its tokens already."""
    parts, costs = parts_over(beside), sharding.costs
    result = _bytes(rows.total.outputs[0], sharding) / parts
    if beside:
        return costs.collective("AllReduce", over, result)
    marks = _bytes(rows.chosen, sharding)  # one byte for each expert and row
    decisions = share * marks * _COUNT_BYTES
    tokens = [_bytes(node.inputs[1], sharding) for node in rows.enter]
    gathered = sum(costs.collective("AllGather", over, size) for size in (*tokens, decisions))
    return gathered + costs.collective("ReduceScatter", over, result)


def _bytes(tensor: gs.Tensor, sharding: ShardingState) -> float:
    """Bytes of a whole tensor, as the mean over the sizes for which costs are computed."""
    leaves = sharding.factors.tensors[tensor.name].leaves
    return mean_bytes(tensor, FactorSharding(tuple(() for _ in leaves)), sharding)
