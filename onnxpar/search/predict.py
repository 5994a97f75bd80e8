"""What a run takes by the cost model, from the graph behind insert-collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.ir.collectives import DOMAIN, LOCAL_STEPS
from onnxpar.ir.repetitions import repetitions
from onnxpar.ir.subgraphs import all_nodes
from onnxpar.layout.rows import rows_moved
from onnxpar.search.op_cost import op_cost
from onnxpar.search.op_strategies import OpStrategy
from onnxpar.sharding.planned_collectives import reshards
from onnxpar.sharding.shard_bytes import shard_bytes
from onnxpar.sharding.state import ShardingState


@dataclass(frozen=True)
class Prediction:
    """Seconds of a run on the rank that has the most to do."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        """Both, one after the other."""
        return self.compute + self.communication


def predict(graph: gs.Graph, sharding: ShardingState) -> Prediction:
    """What the nodes and the reshards of a graph take."""
    each = predict_nodes(all_nodes(graph), sharding).values()
    return Prediction(sum(p.compute for p in each), sum(p.communication for p in each))


def predict_on_one(nodes: Iterable[gs.Node], sharding: ShardingState) -> float:
    """Seconds that the nodes take where one rank does everything."""
    times = repetitions(list(nodes))
    total = 0.0
    for op in sharding.factors.ops:
        whole = OpStrategy(tuple(() for _ in op.leaves))
        total += times.get(op.node.name, 0) * sum(op_cost(op, whole, sharding))
    return total


def predict_nodes(nodes: Iterable[gs.Node], sharding: ShardingState) -> dict[str, Prediction]:
    """What each node takes, by name, in all turns of the loops around it. What ranks tell each
    other inside an op is communication; a local cut is computing. What the rules do not know (a
    pass has added it) is left out."""
    nodes = list(nodes)
    times = repetitions(nodes)
    found: dict[str, Prediction] = {}
    ops = {op.node.name: op for op in sharding.factors.ops}
    for node in nodes:
        if node.domain == DOMAIN:
            seconds = reshard_seconds(node, sharding) * times[node.name]
            is_local = node.op in LOCAL_STEPS
            found[node.name] = Prediction(seconds, 0.0) if is_local else Prediction(0.0, seconds)
        elif node.name in ops:
            op = ops[node.name]
            choice = OpStrategy(tuple(sharding.op_axes(op)))
            seconds, talk = op_cost(op, choice, sharding)
            found[node.name] = Prediction(seconds * times[node.name], talk * times[node.name])
    return found


def reshard_seconds(node: gs.Node, sharding: ShardingState) -> float:
    """What a collective or a local cut between two layouts takes."""
    mesh = sharding.mesh
    costs = sharding.costs
    size = sum(
        max(shard_bytes(tensor, before, mesh), shard_bytes(tensor, after, mesh))
        for tensor, before, after in reshards(node)
    )
    rows = sum(rows_moved(before.dims, after.dims, mesh) for _, before, after in reshards(node))
    return costs.step(node.op, node.attrs["axes"], size) + costs.rows(rows)
