"""Results that searches of one model share: on several meshes, and again within a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from onnxpar.base.arrays import Array
from onnxpar.cost.cost import Costs
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.search.op_strategies import OpStrategy
from onnxpar.search.reshard_tables import ReshardTables

MOST_ENTRIES = 8 << 20
"""Most entries of the tables of all meshes (64 MB); beyond, those of earlier meshes are
forgotten."""


@dataclass
class OnMesh:
    """Results for one mesh. The key of a node is the number of its signature, with its strategy
    that another search has decided.

    strategies    all strategies of nodes
    combinations  the numbers of combinations of splits of nodes
    reshards      seconds of reshards, each with the cost model of the sums of gradients (None: of
                  other tensors), and whether seconds of compute are apart
    compute       costs of nodes that are the same on all meshes
    """

    compute: dict[Hashable, tuple[float, float]]
    strategies: dict[Hashable, list[OpStrategy]] = field(default_factory=dict)
    combinations: dict[Hashable, int] = field(default_factory=dict)
    reshards: list[tuple[Costs | None, bool, ReshardTables]] = field(default_factory=list)
    _op_costs: dict[int, tuple[Sequence[OpStrategy], Array]] = field(default_factory=dict)

    def op_costs(self, strategies: Sequence[OpStrategy], compute: Callable[[], Array]) -> Array:
        """The costs of nodes that share this list of strategies, computed at the first call."""
        entry = self._op_costs.get(id(strategies))
        if entry is None:
            entry = self._op_costs[id(strategies)] = strategies, compute()
        return entry[1]

    def tables(self, costs: Costs | None, apart: bool) -> ReshardTables:
        """The seconds of reshards by this cost model, with seconds of compute `apart` or not."""
        for model, is_apart, tables in self.reshards:
            if model == costs and is_apart is apart:
                return tables
        tables = ReshardTables()
        self.reshards.append((costs, apart, tables))
        return tables

    @property
    def entries(self) -> int:
        """The entries of all tables."""
        return sum(tables.entries for *_, tables in self.reshards)


@dataclass
class Known:
    """Results for a model; `signs` has the numbers of nodes' signatures."""

    signs: dict[Hashable, int] = field(default_factory=dict)
    _meshes: list[tuple[Topology, Mesh, OnMesh]] = field(default_factory=list)

    def on(self, costs: Costs) -> OnMesh:
        """The results for a mesh on a topology."""
        alike = [each for each in self._meshes if each[0] == costs.topology]
        for _, mesh, results in alike:
            if mesh == costs.mesh:
                return results
        while sum(results.entries for *_, results in self._meshes) > MOST_ENTRIES:
            self._meshes.pop(0)
        results = OnMesh(alike[-1][2].compute if alike else {})
        self._meshes.append((costs.topology, costs.mesh, results))
        return results
