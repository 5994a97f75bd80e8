"""What a run takes by the cost model, from the graph behind insert-collectives."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.collective import DOMAIN
from onnxpar.plan import part_bytes, reshards
from onnxpar.search.choices import Choice
from onnxpar.search.work import work_seconds
from onnxpar.sharding import Sharding
from onnxpar.subgraphs import all_nodes


@dataclass(frozen=True)
class Prediction:
    """Seconds of a run on the rank that has the most to do."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        """Both, one after the other."""
        return self.compute + self.communication


def predict(graph: gs.Graph, sharding: Sharding) -> Prediction:
    """What the nodes and the reshards of a graph take."""
    compute = sum(
        work_seconds(op, Choice(tuple(sharding.op_axes(op))), sharding)
        for op in sharding.factors.ops
    )
    communication = sum(
        reshard_seconds(node, sharding) for node in all_nodes(graph) if node.domain == DOMAIN
    )
    return Prediction(compute, communication)


def reshard_seconds(node: gs.Node, sharding: Sharding) -> float:
    """What a collective or a local cut between two layouts takes."""
    mesh = sharding.mesh
    size = sum(
        max(part_bytes(tensor, before, mesh), part_bytes(tensor, after, mesh))
        for tensor, before, after in reshards(node)
    )
    return sharding.costs.step(node.op, node.attrs["axes"], size)
