"""Predicts the time of a run by the cost model, from the graph after the pass
insert-collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxpar.cost.cost import Costs
from onnxpar.cost.device import Device
from onnxpar.graph.collectives import KINDS, LOCAL_STEPS
from onnxpar.graph.repetitions import repetitions
from onnxpar.graph.reshards import is_reshard, operands_of, reshard_of
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.layout.rows import rows_moved
from onnxpar.search.op_cost import op_cost, op_cost_on
from onnxpar.search.op_strategies import OpStrategy
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.shard_bytes import reshard_bytes
from onnxpar.sharding.state import ShardingState


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a run: the sum over nodes, each on the rank that is slowest in it."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        """The seconds of compute plus the seconds of communication."""
        return self.compute + self.communication


def predict(graph: gs.Graph, sharding: ShardingState) -> Prediction:
    """Predicts the seconds of a graph: the sum over all its nodes and reshards."""
    each = predict_nodes(all_nodes(graph), sharding).values()
    return Prediction(sum(p.compute for p in each), sum(p.communication for p in each))


def predict_on_one(nodes: Iterable[gs.Node], sharding: ShardingState, alone: bool = True) -> float:
    """Returns the seconds of the nodes if one rank computed everything: the rank with the fastest
    device or, if `alone`, a rank that has all cores of a host."""
    times = repetitions(list(nodes))
    costs = sharding.costs
    if alone and costs.topology.alone is not None:
        topology = replace(costs.topology, device=costs.topology.alone)
        sharding = replace(sharding, costs=Costs(topology, sharding.mesh))
    ranks: dict[Device, int | None] = {}
    for rank in range(sharding.mesh.size) if costs.topology.devices else ():
        ranks.setdefault(costs.topology.device_of(rank), rank)
    return min(
        sum(
            times.get(op.node.name, 0) * sum(op_cost_on(rank, op, _whole(op), sharding))
            for op in sharding.factors.ops
        )
        for rank in ranks.values() or [None]
    )


def _whole(op: OpFactors) -> OpStrategy:
    """The strategy that splits nothing."""
    return OpStrategy(tuple(() for _ in op.leaves))


def compute_by_rank(nodes: Iterable[gs.Node], sharding: ShardingState) -> list[float]:
    """Returns, for each rank, the seconds in which it computes these nodes; slices between layouts
    are left out."""
    times = repetitions(list(nodes))
    ops = [(op, OpStrategy(tuple(sharding.op_axes(op)))) for op in sharding.factors.ops]
    return [
        sum(
            times[op.node.name] * op_cost_on(rank, op, strategy, sharding)[0]
            for op, strategy in ops
            if op.node.name in times
        )
        for rank in range(sharding.mesh.size)
    ]


def predict_nodes(nodes: Iterable[gs.Node], sharding: ShardingState) -> dict[str, Prediction]:
    """Predicts the seconds of each node, by name, in all iterations of the loops around it.
    Communication inside an op counts as communication, and slices between layouts as compute. Nodes
    that passes added and that have no rule are left out."""
    nodes = list(nodes)
    times = repetitions(nodes)
    predictions: dict[str, Prediction] = {}
    ops = {op.node.name: op for op in sharding.factors.ops}
    for node in nodes:
        if is_reshard(node):
            seconds = reshard_seconds(node, sharding) * times[node.name]
            is_local = node.op in LOCAL_STEPS
            predictions[node.name] = (
                Prediction(seconds, 0.0) if is_local else Prediction(0.0, seconds)
            )
        elif node.name in ops:
            op = ops[node.name]
            strategy = OpStrategy(tuple(sharding.op_axes(op)))
            seconds, communication = op_cost(op, strategy, sharding)
            predictions[node.name] = Prediction(
                seconds * times[node.name], communication * times[node.name]
            )
    return predictions


def reshard_seconds(node: gs.Node, sharding: ShardingState) -> float:
    """Returns the seconds of a node that reshards: a collective, or a slice on each rank."""
    costs = sharding.costs
    sends_chosen = reshard_of(node).share < 1.0
    each = [] if KINDS[node.op].by_message or sends_chosen else operands_of(node)
    rows = sum(rows_moved(before.dims, after.dims) for _, before, after in each)
    return costs.step(node.op, reshard_of(node).axes, reshard_bytes(node)) + costs.rows(rows)
