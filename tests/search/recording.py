"""The search for a mesh, which notes what it tries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnxpar.cost.topology import Topology
from onnxpar.planner.context import load_model
from onnxpar.planner.options import Options
from onnxpar.search.meshes import best_mesh
from onnxpar.search.op_strategies import Kept
from onnxpar.search.search import Solution, solve
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.strategy import Annotation


class Recording:
    """Solves, and keeps the meshes."""

    def __init__(self, path: Path, devices: int, topology: Topology) -> None:
        self.model = load_model(path, Options(devices=devices))
        self.factors = analyse(self.model.graph)
        self.topology = topology
        self.devices = devices
        self.found: dict[tuple[int, ...], float] = {}

    def solve(
        self,
        sharding: ShardingState,
        given: Sequence[Sequence[Annotation]],
        kept: Kept | None,
        below: float,
    ) -> Solution:
        states = self.model.states
        found = solve(self.model.graph, sharding, states, given, kept=kept, below=below)
        if kept is None:
            self.found[tuple(size for _, size in sharding.mesh.shape)] = found.seconds
        return found

    def best(self) -> Solution:
        return best_mesh(self.model, self.factors, self.devices, self.topology, self.solve)
