"""Graphs of reshards that are too large for all paths, and the tables that tensors share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest

from onnxpar.cost.cost import Costs
from onnxpar.cost.topology import Topology
from onnxpar.layout.layout import Factor
from onnxpar.layout.mesh import Axes, Axis, Mesh
from onnxpar.search import reshard_tables
from onnxpar.search.reshard_tables import ReshardTables
from onnxpar.sharding import reshard_graph
from onnxpar.sharding.factors import Leaf, TensorFactors
from onnxpar.sharding.reshard_graph import ReshardGraph
from onnxpar.sharding.reshard_planner import ReshardedTensor
from onnxpar.sharding.state import FactorSharding

MESH = Mesh((("dp", 16), ("tp", 64)))
DP, TP = MESH.axis("dp"), MESH.axis("tp")
HIGH, LOW = Axis("tp", 4), Axis("tp", 16, 4)
SIZES = (64, 1024, 256)
TENSOR = TensorFactors(
    tuple(map(Factor, SIZES)), tuple(Leaf(i, size) for i, size in enumerate(SIZES)), (0, 1, 2)
)
ABOUT = ReshardedTensor(TENSOR, Costs(Topology.default(), MESH))


def shardings() -> list[FactorSharding]:
    """Sums over an axis, and splits by two axes of which the second is on two leaves."""
    found = [FactorSharding(((), (), ()), over) for over in ((), (DP,), (TP,))]
    for first in range(3):
        for second in range(3):
            leaves: list[Axes] = [(), (), ()]
            leaves[first] += (DP,)
            leaves[second] += (HIGH,)
            leaves[(second + 1) % 3] += (LOW,)
            found.append(FactorSharding(tuple(leaves)))
    return found


def seconds(wanted: Sequence[FactorSharding]) -> np.ndarray:
    return ReshardGraph(wanted, TENSOR, ABOUT.costs, ABOUT.itemsize).seconds()


@pytest.mark.parametrize("apart", [False, True])
def test_paths_between_two_shardings_are_the_best_of_those_alone(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No path is shorter than in the whole graph, and none is longer than where nothing but its
    start and its goal counts."""
    wanted = shardings()
    monkeypatch.setattr(reshard_graph, "MOST_DETOURS", 0)
    whole = seconds(wanted)
    monkeypatch.setattr(reshard_graph, "MOST_STATES", 0)
    made = ReshardGraph(wanted, TENSOR, ABOUT.costs, ABOUT.itemsize)
    found = made.seconds_apart().sum(0) if apart else made.seconds()
    assert len(wanted) < len(made.states) < made.numbering.most
    assert np.isfinite(found).all() and (found >= whole * (1 - 1e-9)).all()
    for i, j in permutations(range(len(wanted)), 2):
        alone = seconds([wanted[i], wanted[j]])[0, 1]
        assert found[i, j] <= alone * (1 + 1e-9)


def test_tensors_share_a_table_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshard_graph, "MOST_DETOURS", 0)  # so that each set has a graph of its own
    made: list[int] = []
    build = reshard_tables._graph

    def counted(wanted: Sequence[FactorSharding], about: ReshardedTensor) -> ReshardGraph:
        made.append(len(wanted))
        return build(wanted, about)

    monkeypatch.setattr(reshard_tables, "_graph", counted)
    tables, wanted = ReshardTables(), shardings()
    some = random.Random(0).sample(wanted, 7)
    tables.add("key", wanted)
    for order in (some, some[::-1], random.Random(1).sample(some, 7), wanted):
        (found,) = tables.of("key", order, ABOUT, lambda _: 1.0, apart=False)
        first = sorted(order, key=wanted.index)  # the order decides which sub-axis is the first
        at = [first.index(sharding) for sharding in order]
        np.testing.assert_allclose(found, seconds(first)[np.ix_(at, at)], rtol=1e-9)
    assert made == [12, 7, 12]  # all together, which is too large, then each set once
