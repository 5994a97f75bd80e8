"""The option --balance: ranks take shares of the work in proportion to the speed of their devices,
as far as their memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from onnxpar.base.errors import StrategyError
from onnxpar.cost.device import Device
from onnxpar.cost.topology import Topology
from onnxpar.graph.subgraphs import constants
from onnxpar.graph.tensors import shape_bytes, tensor_shape
from onnxpar.layout.mesh import Mesh
from onnxpar.layout.shares import most_weight
from onnxpar.load.load import Model
from onnxpar.planner.attempt import Attempt, Planned
from onnxpar.planner.options import Options
from onnxpar.search.objective import Objective, OverLimit
from onnxpar.search.predict import predict_on_one
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.state import ShardingState

ROUNDS = 8
"""Most plans to make in search of shares that fit into memory."""
SLACK = 0.98
"""If a rank needed more than its memory, the next plan aims at this fraction of its memory."""

PROGRESS = 0.999
"""The search for shares ends if the rank with the fullest memory still holds more than this
fraction of what it held in the last plan: then other shares do not help."""


def balanced_topology(options: Options, model: Model, factors: GraphFactors) -> Topology | None:
    """Returns the topology of the options; with --balance, with the share of the work that each
    rank takes. Errors: StrategyError if all ranks have the same device."""
    topology = options.topology
    if not options.balance:
        return topology
    if topology is None or not topology.devices:
        raise StrategyError(
            "--balance: the ranks have equal devices; give devices that differ in a --topology, or "
            "leave it out"
        )
    if options.shares:
        return replace(topology, shares=options.shares)
    seconds = {d: _seconds(model, factors, topology, d) for d in dict.fromkeys(topology.devices)}
    speeds = [1 / seconds[device] for device in topology.devices]
    states = {source for source, _ in model.states}
    stored = [*constants(model.graph), *(t for t in model.graph.inputs if t.name in states)]
    total = sum(shape_bytes(t, [size or 1 for size in tensor_shape(t) or ()]) for t in stored)
    memories = limits(topology, options.objective)
    most = [limit / total if total else math.inf for limit in memories]
    return replace(topology, shares=cap_shares(speeds, most))


def sampled_remainders(options: Options) -> int:
    """Returns the number m such that samples of open sizes should have every remainder modulo m:
    then shards of ranks with equal shares, whose bounds are rounded differently, differ in at least
    one sample. 0 without --balance."""
    if not options.balance or options.topology is None:
        return 0
    return most_weight(len(options.topology.devices))


def _seconds(model: Model, factors: GraphFactors, topology: Topology, device: Device) -> float:
    """Returns the seconds in which a device would compute the whole model, without the launch of
    ops, as a measure of its speed."""
    alone = Topology(topology.levels, replace(device, launch=0.0))
    sharding = ShardingState.open(Mesh.of([("all", 1)]), factors, alone)
    return predict_on_one(model.graph.nodes, sharding) or 1.0


def limits(topology: Topology, objective: Objective) -> list[float]:
    """Returns the bytes that each rank may hold; infinite if there is no limit."""
    if objective.memory is None:
        return [device.memory or math.inf for device in topology.devices]
    weights = map(objective.weight_of, range(len(objective.memories or topology.devices)))
    return [objective.memory / weight if weight else math.inf for weight in weights]


def cap_shares(weights: Sequence[float], most: Sequence[float]) -> tuple[float, ...]:
    """Returns shares in proportion to weights, none above its cap in `most`: other ranks take over
    the rest. If the caps add up to less than 1, the shares are in proportion to the caps.

    >>> cap_shares([3.0, 1.0, 1.0], [0.5, 1.0, 1.0])
    (0.5, 0.25, 0.25)
    """
    if math.fsum(most) <= 1:
        return tuple(m / math.fsum(most) for m in most)
    full: set[int] = set()
    while True:
        rest = 1 - math.fsum(most[i] for i in full)
        free = math.fsum(w for i, w in enumerate(weights) if i not in full)
        shares = [most[i] if i in full else w * rest / free for i, w in enumerate(weights)]
        over = {i for i, share in enumerate(shares) if share > most[i] and i not in full}
        if not over:
            return tuple(shares)
        full |= over


def fitting_shares(
    attempt: Attempt, topology: Topology | None, make: Callable[[Attempt], Planned]
) -> Planned:
    """Returns a plan whose shares of the work fit into the memory of each rank's device: if a rank
    needs more, other ranks take over some of its share in the next attempt. If no plan fits,
    returns the first one. `make` makes the plan of an attempt. Errors: OverLimit if a search finds
    no strategy that fits."""
    most = limits(topology or Topology.default(), attempt.objective)
    try:
        first = make(attempt)
    except OverLimit:
        if not all(map(math.isfinite, most)):
            raise
        first = make(replace(attempt, shares=cap_shares(most, [1.0] * len(most))))
    planned, speeds = first, _shares(first)
    for _ in range(ROUNDS if topology is not None else 0):
        if not speeds or _fullness(planned, most) <= 1:
            return planned
        caps = [
            share * limit / load.held * (SLACK if load.held > limit else 1)
            for share, limit, load in zip(_shares(planned), most, planned.plan.loads, strict=False)
        ]
        rest = [math.inf] * (len(speeds) - len(caps))
        before = planned
        planned = make(replace(attempt, shares=cap_shares(speeds, [*caps, *rest])))
        if _fullness(planned, most) > _fullness(before, most) * PROGRESS:
            break
    return first


def _shares(planned: Planned) -> tuple[float, ...]:
    return planned.ctx.sharding.costs.topology.shares


def _fullness(planned: Planned, most: Sequence[float]) -> float:
    """Returns the largest ratio, over ranks, of the bytes that the plan holds there to the bytes in
    `most`."""
    pairs = zip(planned.plan.loads, most, strict=False)
    return max((load.held / limit for load, limit in pairs), default=0.0)
