"""What searches of one model compute once: for several meshes, and again within a memory limit."""

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
"""Entries of the tables of meshes above which those of earlier meshes are forgotten: 64 MB."""


@dataclass
class OnMesh:
    """What is known for one mesh. A node is known by the number of its signature, and by what
    another search has decided for it.

    strategies    all strategies of nodes
    combinations  the numbers of combinations of splits of nodes
    reshards      seconds of reshards, each with the cost model of the sums of gradients (None: of
                  other tensors), and whether those of compute are apart
    compute       costs of nodes that are the same on all meshes
    """

    compute: dict[Hashable, tuple[float, float]]
    strategies: dict[Hashable, list[OpStrategy]] = field(default_factory=dict)
    combinations: dict[Hashable, int] = field(default_factory=dict)
    reshards: list[tuple[Costs | None, bool, ReshardTables]] = field(default_factory=list)
    _op_costs: dict[int, tuple[Sequence[OpStrategy], Array]] = field(default_factory=dict)

    def op_costs(self, strategies: Sequence[OpStrategy], compute: Callable[[], Array]) -> Array:
        """The costs of nodes that share this list of strategies, computed at the first time."""
        found = self._op_costs.get(id(strategies))
        if found is None:
            found = self._op_costs[id(strategies)] = strategies, compute()
        return found[1]

    def tables(self, costs: Costs | None, apart: bool) -> ReshardTables:
        """The seconds of reshards by this cost model, those of compute `apart` or not."""
        for given, is_apart, found in self.reshards:
            if given == costs and is_apart is apart:
                return found
        found = ReshardTables()
        self.reshards.append((costs, apart, found))
        return found

    @property
    def entries(self) -> int:
        """The entries of all tables."""
        return sum(tables.entries for *_, tables in self.reshards)


@dataclass
class Known:
    """What is known of a model; `signs` has the numbers of nodes' signatures."""

    signs: dict[Hashable, int] = field(default_factory=dict)
    _meshes: list[tuple[Topology, Mesh, OnMesh]] = field(default_factory=list)

    def on(self, costs: Costs) -> OnMesh:
        """What is known for a mesh on a topology."""
        alike = [each for each in self._meshes if each[0] == costs.topology]
        for _, mesh, found in alike:
            if mesh == costs.mesh:
                return found
        while sum(found.entries for *_, found in self._meshes) > MOST_ENTRIES:
            self._meshes.pop(0)
        found = OnMesh(alike[-1][2].compute if alike else {})
        self._meshes.append((costs.topology, costs.mesh, found))
        return found
