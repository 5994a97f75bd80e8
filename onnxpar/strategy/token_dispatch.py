"""Decides how the tokens of a mixture reach the ranks of their experts: each rank gathers all
tokens, or ranks exchange rows, and each token reaches only the ranks of its own experts.

Megatron-LM names the two dispatchers `allgather` and `alltoall`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_graphsurgeon as gs

from onnxpar.layout.layout import default_parts
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.expert_rows import Role
from onnxpar.sharding.mixtures import Mixture
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState

_COUNT_BYTES = 8
_LAUNCHES = 30
"""The number of additional nodes that a rank runs to sort the rows that it sends and receives."""


def exchanged_mixtures(sharding: ShardingState, over: Axes, beside: Axes) -> Iterator[Mixture]:
    """Yields the mixtures of experts for which the exchange of rows is cheaper than gathering all
    tokens.

    over    the axes that split experts
    beside  the other axes, which split tokens
    """
    for mixture in sharding.factors.mixtures:
        if not mixture.moved or mixture.share is None:
            continue
        experts = sharding.factors.tensors[mixture.rows.chosen.name].dims[0].size
        if not min(default_parts(experts, over)):
            continue
        moved = [mixture.share * _bytes(tensor, sharding) for tensor in mixture.moved]
        gathered = _gather(mixture, mixture.share, sharding, over, beside)
        if _exchange(moved, experts, sharding, over, beside) < gathered:
            yield mixture


def _exchange(
    moved: Sequence[float], experts: int, sharding: ShardingState, over: Axes, beside: Axes
) -> float:
    """Returns the seconds of an exchange of rows: the numbers of rows for each of the experts go
    first, then the chosen rows, there and back. `moved` has the bytes of each exchanged tensor's
    chosen rows."""
    ranks, costs = parts_over(over) * parts_over(beside), sharding.costs
    sizes = [*(size / ranks for size in moved), _COUNT_BYTES * experts]
    launches = _LAUNCHES * max(device.launch for device in costs.devices)
    return sum(costs.collective("AllToAll", over, size) for size in sizes) + launches


def _gather(
    mixture: Mixture, share: float, sharding: ShardingState, over: Axes, beside: Axes
) -> float:
    """Returns the seconds if each rank gathers all tokens and ranks add up the results, in both
    passes of a training step. If the axes `beside` split the batch, every rank along `over` has its
    tokens already. `share` is the share of chosen rows."""
    parts, costs, rows = parts_over(beside), sharding.costs, mixture.rows
    results = [_bytes(node.outputs[0], sharding) / parts for node in rows.of(Role.TOTAL)]
    if beside:
        return sum(costs.collective("AllReduce", over, size) for size in results)
    marks = _bytes(rows.chosen, sharding)  # one byte for each expert and row
    decisions = share * marks * _COUNT_BYTES
    gathered = [*(_bytes(tensor, sharding) for tensor in mixture.entering), decisions]
    return sum(costs.collective("AllGather", over, size) for size in gathered) + sum(
        costs.collective("ReduceScatter", over, size) for size in results
    )


def _bytes(tensor: gs.Tensor, sharding: ShardingState) -> float:
    """Returns the bytes of a whole tensor, on average over the sizes at which costs are
    computed."""
    leaves = sharding.factors.tensors[tensor.name].leaves
    return mean_bytes(tensor, FactorSharding(tuple(() for _ in leaves)), sharding)
