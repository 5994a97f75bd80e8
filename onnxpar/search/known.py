"""Results that several searches for one model share: on several meshes, and again within a memory
limit."""

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
"""Most entries of the tables of all meshes (64 MB); if there are more, the tables of earlier meshes
are forgotten."""


@dataclass
class OnMesh:
    """Results for one mesh. A node's key is the number of its signature (equal for nodes with the
    same strategies and costs), and its strategy if another search has decided one.

    strategies    all strategies of a node, by its key
    combinations  the number of combinations of splits of a node, by its key
    reshards      tables of seconds of reshards, each with the cost model for sums of gradients
                  (None: for other tensors), and whether seconds of compute and communication are
                  apart
    compute       costs of nodes, which all meshes share
    """

    compute: dict[Hashable, tuple[float, float]]
    strategies: dict[Hashable, list[OpStrategy]] = field(default_factory=dict)
    combinations: dict[Hashable, int] = field(default_factory=dict)
    reshards: list[tuple[Costs | None, bool, ReshardTables]] = field(default_factory=list)
    _op_costs: dict[int, tuple[Sequence[OpStrategy], Array]] = field(default_factory=dict)

    def op_costs(self, strategies: Sequence[OpStrategy], compute: Callable[[], Array]) -> Array:
        """Returns the costs of nodes that share this list of strategies; calls `compute` for them
        the first time."""
        entry = self._op_costs.get(id(strategies))
        if entry is None:
            entry = self._op_costs[id(strategies)] = strategies, compute()
        return entry[1]

    def tables(self, costs: Costs | None, apart: bool) -> ReshardTables:
        """Returns the table of seconds of reshards by this cost model. If `apart`, it has seconds
        of compute and of communication separately."""
        for model, is_apart, tables in self.reshards:
            if model == costs and is_apart is apart:
                return tables
        tables = ReshardTables()
        self.reshards.append((costs, apart, tables))
        return tables

    @property
    def entries(self) -> int:
        """The number of entries of all tables."""
        return sum(tables.entries for *_, tables in self.reshards)


@dataclass
class Known:
    """Results for one model on all meshes. `signs` has the number of each node's signature."""

    signs: dict[Hashable, int] = field(default_factory=dict)
    _meshes: list[tuple[Topology, Mesh, OnMesh]] = field(default_factory=list)

    def on(self, costs: Costs) -> OnMesh:
        """Returns the results for the mesh and topology of this cost model; new ones if there are
        none."""
        alike = [each for each in self._meshes if each[0] == costs.topology]
        for _, mesh, results in alike:
            if mesh == costs.mesh:
                return results
        while sum(results.entries for *_, results in self._meshes) > MOST_ENTRIES:
            self._meshes.pop(0)
        results = OnMesh(alike[-1][2].compute if alike else {})
        self._meshes.append((costs.topology, costs.mesh, results))
        return results
