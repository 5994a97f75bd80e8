"""The cost model of a node: its seconds under a strategy, on the slowest rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_graphsurgeon as gs

from onnxpar.cost.device import Device
from onnxpar.graph.attribute_weights import AT, has_attribute_weights
from onnxpar.graph.paged_attention import COMPUTE, KEYS, PAGED_ATTENTION, POSITIONS, TABLE, VALUES
from onnxpar.graph.tensors import shape_bytes
from onnxpar.layout.mesh import parts_over
from onnxpar.search.op_strategies import OpStrategy
from onnxpar.search.rated_ops import copied_rows, rated_as, work_of
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.flops import flops_over, without_rings
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.lifetimes import VIEWS
from onnxpar.sharding.state import FactorSharding, ShardingState
from onnxpar.strategy.contraction import convolves, is_contraction
from onnxpar.strategy.recurrences import WEIGHTS, is_recurrence

_LOOK_UP = frozenset(("Gather", "GatherND", "GatherElements"))
"""Ops that read only as many bytes of their first operand as they return."""
_ROW_AXIS = {
    "Gather": 0,
    "Split": 0,
    "Concat": 0,
    "Softmax": -1,
    "LogSoftmax": -1,
    "LayerNormalization": -1,
    "RMSNormalization": -1,
}
"""The default axis of ops that process contiguous rows, which extend from that axis to the last."""
_MATRICES = 3
"""The number of dimensions of the tensors of a mixture of experts: expert, row, column."""
_NODE = 64
"""Bytes in attributes that a node of a tree of a forest takes."""
_VISIT = 40
"""A visit to a node of a tree, which is a jump in memory, takes as long as this many operations."""
_CACHE = 8.0
"""How many times as fast the first-level cache is as memory."""
_EDGE_COPIES = 3
"""How often rows are copied for the edge of a shard: once to send it; twice to join it with the
shard."""
_ROUNDS = 2
"""The number of small all-reduces in place of an op whose communicating factors are split."""


@dataclass(frozen=True)
class _Part:
    """A rank's shard of a tensor, or the largest shard: its shape and bytes; empty if the shape is
    unknown."""

    shape: tuple[int, ...] = ()
    bytes: float = 0.0


def op_cost(op: OpFactors, strategy: OpStrategy, sharding: ShardingState) -> tuple[float, float]:
    """Returns (seconds of compute, seconds of communication inside the node) on the slowest rank:
    the one with the largest shards, if all have the same device. Compute is a roofline of
    operations and bytes read and written, plus a cost per row. Both are means over the typical
    sizes."""
    ranks = _candidates(op, strategy, sharding) if sharding.costs.topology.devices else [None]
    each = [op_cost_on(rank, op, strategy, sharding) for rank in ranks]
    return max(own for own, _ in each), max(between for _, between in each)


def _candidates(
    op: OpFactors, strategy: OpStrategy, sharding: ShardingState
) -> Sequence[int | None]:
    """Returns ranks among which the slowest one is: for each device, the ranks whose shards no
    other rank with this device exceeds."""
    columns = [
        sharding.sizes_by_rank(leaf.atom, over, op.extent(i))
        for i, (leaf, over) in enumerate(zip(op.leaves, strategy.axes, strict=True))
        if over
    ]
    by_device: dict[Device, dict[tuple[int, ...], int]] = defaultdict(dict)
    for rank in range(sharding.mesh.size):
        sizes = tuple(column[rank] for column in columns)
        by_device[sharding.costs.topology.device_of(rank)].setdefault(sizes, rank)
    ranks: list[int] = []
    for by_sizes in by_device.values():
        largest = tuple(map(max, zip(*by_sizes, strict=True)))
        ranks += [by_sizes[largest]] if largest in by_sizes else by_sizes.values()
    return ranks


def op_cost_on(
    rank: int | None, op: OpFactors, strategy: OpStrategy, sharding: ShardingState
) -> tuple[float, float]:
    """Returns what `op_cost` does, for one rank; if `rank` is None, for the slowest device with the
    largest shards."""
    if op.bodies:
        return 0.0, 0.0
    dealt = {axis for over in strategy.axes for axis in over if axis.at is not None}
    if dealt:
        return _mean_cost(rank, op, strategy, sharding, parts_over(dealt))
    seconds = communication = 0.0
    for number, (weight, at) in enumerate(op.costed):
        own, between = _op_cost(at, strategy, sharding, number, rank)
        seconds, communication = seconds + weight * own, communication + weight * between
    return seconds, communication


def _mean_cost(
    rank: int | None, op: OpFactors, strategy: OpStrategy, sharding: ShardingState, ranks: int
) -> tuple[float, float]:
    """Returns the mean cost, over `ranks` ranks, of a node that one of them computes as a whole:
    the others compute as much of other nodes. Each rank launches the node."""
    undealt = tuple(tuple(a for a in over if a.at is None) for over in strategy.axes)
    seconds, communication = op_cost_on(rank, op, replace(strategy, axes=undealt), sharding)
    in_loop = sharding.factors.in_loops.get(op.node.name)
    launches = in_loop is None or in_loop.is_first
    launch = sharding.costs.topology.device.launch if launches else 0.0
    return launch + (seconds - launch) / ranks, communication / ranks


def _op_cost(
    op: OpFactors, strategy: OpStrategy, sharding: ShardingState, at: int, rank: int | None
) -> tuple[float, float]:
    """Returns what `op_cost_on` does, at one of the typical sizes, given by its index `at`."""
    node, costs = op.node, sharding.costs
    device = None if rank is None else costs.topology.device_of(rank)
    part = partial(_part, sharding=sharding, at=at, rank=rank)
    held = [part(t, strategy.operand(op, i)) for i, t in enumerate(node.inputs)]
    produced = [part(t, strategy.result(op, i)) for i, t in enumerate(node.outputs)]
    share = op.computed(strategy.axes)
    if share < 1:
        held, produced = _of_chosen(op, share, held, produced, sharding)
    if node.op == PAGED_ATTENTION and node.domain == COMPUTE:
        held, produced = _of_pages(node, held, produced)
    read, written = sum(part.bytes for part in held), sum(part.bytes for part in produced)
    if node.op in VIEWS:
        read = written = 0.0
    elif node.op == "ScatterND" and node.outputs[0].name in sharding.factors.on_host:
        read = written = sum(part.bytes for part in held[1:])  # the session writes these rows alone
    elif node.op in _LOOK_UP:
        read = written + sum(part.bytes for part in held[1:])
    if node.name in sharding.factors.in_convolutions:  # its operand is already there
        others = sum(part.bytes for part in held) - written
        return costs.memory(max(others, 0.0), device), 0.0
    in_loop = sharding.factors.in_loops.get(node.name)
    if in_loop is not None:
        held = [part if i in in_loop.operands else _Part() for i, part in enumerate(held)]
        produced = [part if i in in_loop.results else _Part() for i, part in enumerate(produced)]
        outside = sum(part.bytes for part in (*held, *produced))
        inside = (read + written) / _CACHE
        launch = costs.compute(0, 0.0, device=device) if in_loop.is_first else 0.0
        moving = costs.memory(outside, device, _far(op, held, produced, sharding))
        return launch + max(moving, costs.memory(inside, device, inside)), 0.0
    count = 0
    if is_recurrence(node):
        weights = sum(math.prod(held[i].shape) for i in WEIGHTS)
        count = 2 * weights * math.prod(held[0].shape[:2])
    elif has_attribute_weights(node):
        count = _attribute_flops(node, held)
    elif is_contraction(op) or op.rule.ranks.products is not None:
        count = flops_over(op, strategy.axes, sharding, rank)
        if node.op == "Conv":
            count = round(count * _in_blocks(node, produced[0], device or costs.devices[0]))
    far = min(_far(op, held, produced, sharding), read + written)
    seconds = costs.compute(count, read + written, convolves(op), device, far) + costs.rows(
        round(_rows(op, held, produced) * share), device
    )
    kind = rated_as(node)
    if kind is not None and produced and produced[0].shape:
        work = work_of(kind, node, [part.shape for part in held], produced[0].shape)
        seconds += share * costs.beyond(kind, *work, device)
    if node.op == "Conv" and strategy.own_partial(op)[0]:  # no fused activation, other format
        seconds += 2 * costs.compute(0, 2 * written, device=device)
    split = [i for i, over in enumerate(strategy.axes) if over]
    lowered = {i for i in split if op.leaves[i].factor in op.rule.ranks.lowered}
    tied = lowered.intersection(i for group in op.co_sharded for i in group)
    if tied:
        seconds += costs.local("Concat", 2 * read) + costs.rows(
            _edge_rows(op, tied, held, sharding.factors), device
        )
        return seconds, _halo(op, strategy, sharding, tied, read)
    if lowered:
        iterations = _iterations(op)
        seconds += (op.rule.ranks.steps * iterations - 1) * costs.compute(
            0, 2 * written / iterations, device=device
        )
    between = _communication(op, strategy, sharding, produced)
    of_rings = (_ring(op, i, j, strategy, sharding, held, produced) for i, j in op.rings)
    return seconds, between + sum(of_rings)


def _far(
    op: OpFactors, held: Sequence[_Part], produced: Sequence[_Part], sharding: ShardingState
) -> float:
    """Returns the bytes of operands and results that come from memory, not from a cache: of inputs,
    of weights, and of tensors that live while the ranks write more than the caches take."""
    each = zip((*op.node.inputs, *op.node.outputs), (*held, *produced), strict=True)
    return sum(part.bytes for tensor, part in each if is_far(tensor, sharding))


def is_far(tensor: gs.Tensor, sharding: ShardingState) -> bool:
    """True if a tensor is no longer in the ranks' caches when it is read."""
    cache = sharding.costs.cache * sharding.mesh.size
    return sharding.factors.lifetimes.get(tensor.name, math.inf) > cache


def _ring(
    op: OpFactors,
    i: int,
    j: int,
    strategy: OpStrategy,
    sharding: ShardingState,
    held: Sequence[_Part],
    produced: Sequence[_Part],
) -> float:
    """Returns the seconds of a ring in which queries stay on their ranks, and the shards of keys
    travel; with the exchanges that give all ranks the same work. `i` and `j` are the node's factors
    (leaves) of queries and of keys. 0 if the strategy has no ring."""
    over, costs = strategy.axes[j], sharding.costs
    if not over or strategy.axes[i] != over:
        return 0.0
    ranks = parts_over(over)
    travels = sum(part.bytes for part, links in zip(held, op.inputs, strict=True) if j in links)
    seconds = (ranks - 1) * costs.collective("CollectivePermute", over, travels)
    size, is_open = op.extent(i), op.leaves[i].atom in sharding.factors.open_atoms
    if not op.rule.balanced or is_open or op.extent(j) != size or size < 2 * ranks:
        return seconds
    rows = [
        part.bytes
        for part, links in zip((*held, *produced), (*op.inputs, *op.outputs), strict=True)
        if i in links
    ]
    return seconds + sum(costs.collective("AllToAll", over, size) for size in (travels, *rows))


def _of_chosen(
    op: OpFactors, share: float, held: Sequence[_Part], produced: Sequence[_Part],
    sharding: ShardingState,
) -> tuple[list[_Part], list[_Part]]:  # fmt: skip
    """Returns the operands and results of a node in a mixture of experts, with the bytes of rows
    that the router chooses, and of the weights of experts that get rows. `share` is the share of
    all pairs (expert, row) that is chosen."""
    assert op.chosen is not None
    of_experts = partial(sharding.factors.is_of_experts, chosen=op.chosen)
    rows = [part.shape[1] for part in (*produced, *held) if len(part.shape) == _MATRICES]
    filled = min(1.0, share * max(rows, default=1))
    operands = [
        replace(part, bytes=part.bytes * (share if of_experts(tensor) else filled))
        for tensor, part in zip(op.node.inputs, held, strict=True)
    ]
    if op.node.op == "Transpose":  # onnxruntime transposes weights when it loads them
        return [replace(part, bytes=0) for part in held], [replace(p, bytes=0) for p in produced]
    results = [
        replace(part, bytes=part.bytes * share) if of_experts(tensor) else part
        for tensor, part in zip(op.node.outputs, produced, strict=True)
    ]
    return operands, results


def _of_pages(
    node: gs.Node, held: Sequence[_Part], produced: Sequence[_Part]
) -> tuple[list[_Part], list[_Part]]:
    """Returns the operands and results of attention over caches in pages, with the bytes of the
    pages that its table names, and of the positions of new tokens."""
    pages = max(held[KEYS].shape[0], 1)
    named = min(math.prod(held[TABLE].shape) / pages, 1.0)
    new = min(math.prod(held[POSITIONS].shape) / (pages * node.inputs[KEYS].shape[2]), 1.0)
    read = [
        replace(part, bytes=part.bytes * named) if i in (KEYS, VALUES) else part
        for i, part in enumerate(held)
    ]
    return read, [produced[0], *(replace(p, bytes=p.bytes * new) for p in produced[1:])]


def _attribute_flops(node: gs.Node, held: Sequence[_Part]) -> int:
    """Returns the number of operations of a forest, which walks down each tree for each row, or of
    an SVM, which compares each row with each vector."""
    rows = held[0].shape[0] if held[0].shape else 1
    count, row = held[AT].shape
    if node.op.startswith("SVM"):
        return rows * count * row // 2  # 4 bytes a feature, subtracted or multiplied, and added
    return round(rows * count * math.log2(2 + row / _NODE) * _VISIT)


def _in_blocks(node: gs.Node, result: _Part, device: Device) -> float:
    """Returns how many output channels a convolution computes for each one that it returns:
    onnxruntime's kernels compute blocks of channels, and pad the last block."""
    channels = result.shape[1] if len(result.shape) > 1 else 0
    if not device.channels or not channels or node.attrs.get("group", 1) != 1:
        return 1.0
    return math.ceil(channels / device.channels) * device.channels / channels


def _part(
    tensor: gs.Tensor,
    factor_sharding: FactorSharding,
    sharding: ShardingState,
    at: int,
    rank: int | None,
) -> _Part:
    """Returns the shape and bytes of a shard of a tensor at one of the typical sizes, given by its
    index `at`: the shard of `rank` or, if that is None, the largest shard."""
    if tensor.name not in sharding.factors.tensors:
        return _Part()
    _, shape = sharding.costed_shapes(tensor.name, factor_sharding, rank)[at]
    return _Part(shape, shape_bytes(tensor, shape))


def _iterations(op: OpFactors) -> int:
    """Returns the number of steps of a recurrence; 1 for other ops."""
    return op.rule.sizes["s"] or 1 if is_recurrence(op.node) else 1


def _rows(op: OpFactors, held: Sequence[_Part], produced: Sequence[_Part]) -> int:
    """Returns the number of rows (stretches of contiguous elements) that a node processes one by
    one; 0 for ops that take no longer for many rows."""
    node, shape = op.node, produced[0].shape if produced else ()
    if not shape:
        return 0
    if is_contraction(op):
        return 0 if convolves(op) else math.prod(shape[:-1])
    if node.op == "Transpose":
        return copied_rows(node, shape)
    if node.op not in _ROW_AXIS or not held[0].shape:
        return 0
    axis = node.attrs.get("axis", _ROW_AXIS[node.op]) % len(held[0].shape)
    rows = math.prod(held[0].shape[:axis])
    if node.op == "Gather":
        return rows * math.prod(held[1].shape)
    return rows * max(len(produced), len(held) if node.op == "Concat" else 1)


def _edge_rows(
    op: OpFactors, leaves: set[int], held: Sequence[_Part], factors: GraphFactors
) -> int:
    """Returns how many rows a rank copies when it sends and joins the edges of shards along the
    split factors `leaves` (indices into `op.leaves`): for each copy, one row for each element of
    the dimensions before the last split one."""
    dims = factors.tensors[op.node.inputs[0].name].dim_of_leaf
    split = [dim for dim, leaf in zip(dims, op.inputs[0], strict=True) if leaf in leaves]
    return _EDGE_COPIES * math.prod(held[0].shape[: max(split, default=0)])


def _halo(
    op: OpFactors, strategy: OpStrategy, sharding: ShardingState, leaves: set[int], size: float
) -> float:
    """Returns the seconds to fetch the edges of the neighbours' shards, about one position of each,
    along the split factors `leaves` (indices into `op.leaves`). `size` is the bytes that the node
    reads."""
    axes = tuple(dict.fromkeys(a for i in sorted(leaves) for a in strategy.axes[i]))
    extent = max(max(op.extent(i) for i in leaves), 1)
    edge = size * parts_over(axes) / extent
    is_open = any(op.leaves[i].atom in sharding.factors.open_atoms for i in leaves)
    return sharding.costs.collective("HaloExchange" if is_open else "NeighborExchange", axes, edge)


def _communication(
    op: OpFactors, strategy: OpStrategy, sharding: ShardingState, produced: Sequence[_Part]
) -> float:
    """Returns the seconds of communication inside a node whose communicating factors are split:
    all-reduces of partial results, which do not have these factors; in a recurrence, an all-gather
    of the state in each step."""
    kept = without_rings(op, strategy.axes)
    split = {
        i
        for i, (leaf, over) in enumerate(zip(op.leaves, kept, strict=True))
        if over and leaf.factor in op.rule.communicating
    }
    if not split:
        return 0.0
    axes = tuple(dict.fromkeys(a for i in sorted(split) for a in kept[i]))
    result = max((part.bytes for part in produced), default=0.0)
    if is_recurrence(op.node):
        state = result / _iterations(op)
        return _iterations(op) * sharding.costs.collective(
            "AllGather", axes, state * parts_over(axes)
        )
    lacking = [
        part.bytes
        for part, links in zip(produced, op.outputs, strict=True)
        if split.isdisjoint(links)
    ]
    across = math.prod(map(op.extent, split))
    whole = max(lacking, default=result * parts_over(axes) / max(across, 1))
    return _ROUNDS * sharding.costs.collective("AllReduce", axes, whole)
