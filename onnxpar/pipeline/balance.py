"""Shares of the work in proportion to the speed of devices, as far as their memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from onnxpar.compiler.pass_ import PassContext
from onnxpar.compiler.plan import Plan
from onnxpar.cost.device import Device
from onnxpar.cost.topology import Topology
from onnxpar.errors import StrategyError
from onnxpar.ir.subgraphs import constants
from onnxpar.ir.tensors import shape_bytes, tensor_shape
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import Model
from onnxpar.pipeline.options import Options
from onnxpar.search.objective import OverLimit
from onnxpar.search.predict import predict_on_one
from onnxpar.sharding.factors import GraphFactors
from onnxpar.sharding.state import ShardingState

ROUNDS = 8
"""Most plans that are made to find shares that fit into memory."""
SLACK = 0.98
"""Fraction of a device's memory that the next plan aims at, if a rank needed more than it has."""

Made = tuple[Plan, PassContext]


def balanced(options: Options, model: Model, factors: GraphFactors) -> Topology | None:
    """The topology of the options, with the share of the work that each rank takes if they ask for
    that. Errors: StrategyError if all ranks have the same device."""
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
    held = [*constants(model.graph), *(t for t in model.graph.inputs if t.name in states)]
    total = sum(shape_bytes(t, [size or 1 for size in tensor_shape(t) or ()]) for t in held)
    most = [limit / total if total else math.inf for limit in limits(topology, options)]
    return replace(topology, shares=capped(speeds, most))


def _seconds(model: Model, factors: GraphFactors, topology: Topology, device: Device) -> float:
    """Seconds in which a device computes the whole model, without the launch of ops, which takes
    the same time for any part of it."""
    alone = Topology(topology.levels, replace(device, launch=0.0))
    sharding = ShardingState.open(Mesh.of([("all", 1)]), factors, alone)
    return predict_on_one(model.graph.nodes, sharding) or 1.0


def limits(topology: Topology, options: Options) -> list[float]:
    """Bytes that each rank may hold; infinite if there is no limit."""
    given = options.objective.memory
    if given is not None:
        return [given] * len(topology.devices)
    return [device.memory or math.inf for device in topology.devices]


def capped(weights: Sequence[float], most: Sequence[float]) -> tuple[float, ...]:
    """Shares in proportion to weights, none above `most`, whose rest the others take. If all
    together may take less than everything, the shares are in proportion to `most`.

    >>> capped([3.0, 1.0, 1.0], [0.5, 1.0, 1.0])
    (0.5, 0.25, 0.25)
    """
    if math.fsum(most) <= 1:
        return tuple(m / math.fsum(most) for m in most)
    full: set[int] = set()
    while True:
        rest = 1 - math.fsum(most[i] for i in full)
        free = math.fsum(w for i, w in enumerate(weights) if i not in full)
        found = [most[i] if i in full else w * rest / free for i, w in enumerate(weights)]
        over = {i for i, share in enumerate(found) if share > most[i] and i not in full}
        if not over:
            return tuple(found)
        full |= over


def fitting_shares(options: Options, make: Callable[[Options], Made]) -> tuple[Options, Made]:
    """Makes a plan whose shares of the work fit into the memory of each rank's device: where a rank
    needs more than it has, the others take over some of its share. If no plan fits, returns the
    last one. Also returns the options with these shares. Errors: OverLimit if a search finds no
    strategy that fits."""
    topology = options.topology
    try:
        made = make(options)
    except OverLimit:
        assert topology is not None
        most = limits(topology, options)
        if not all(map(math.isfinite, most)):
            raise
        options = replace(options, shares=capped(most, [math.inf] * len(most)))
        return options, make(options)
    assert topology is not None
    speeds: tuple[float, ...] = made[1].sharding.costs.topology.shares
    for _ in range(ROUNDS):
        shares = made[1].sharding.costs.topology.shares
        pairs = list(zip(made[0].loads, limits(topology, options), strict=False))
        if not shares or all(load.held <= limit for load, limit in pairs):
            break
        most = [
            share * limit / load.held * (SLACK if load.held > limit else 1)
            for share, (load, limit) in zip(shares, pairs, strict=False)
        ]
        rest = [math.inf] * (len(shares) - len(most))
        options = replace(options, shares=capped(speeds, [*most, *rest]))
        made = make(options)
    return options, made
