"""The steps of a reshard graph, for tensors of few leaves and of many."""

from __future__ import annotations

import numpy as np
import pytest

from onnxpar.cost.cost import Costs
from onnxpar.cost.topology import Topology
from onnxpar.layout.layout import Factor
from onnxpar.layout.mesh import Axis, Mesh
from onnxpar.sharding.factors import Leaf, TensorFactors
from onnxpar.sharding.reshard_graph import ReshardGraph
from onnxpar.sharding.state import FactorSharding

A, B = Axis("a", 2), Axis("b", 2)
MESH = Mesh((("a", 2), ("b", 2)))


def tensor(leaves: int) -> TensorFactors:
    """A tensor of so many dimensions of four elements each."""
    dims = tuple(Factor(4) for _ in range(leaves))
    return TensorFactors(dims, tuple(Leaf(i, 4) for i in range(leaves)), tuple(range(leaves)))


@pytest.mark.parametrize("leaves", [3, 70])
def test_only_the_last_axis_of_a_leaf_leaves_it(leaves: int) -> None:
    """Where both axes split the last leaf, the minor one leaves in one step, the major in two."""
    factors, last = tensor(leaves), leaves - 1

    def on(*over: tuple[int, tuple[Axis, ...]]) -> FactorSharding:
        held = dict(over)
        return FactorSharding(tuple(held.get(i, ()) for i in range(leaves)))

    both, major, minor = on((last, (A, B))), on((last, (A,))), on((last, (B,)))
    graph = ReshardGraph([both, major, minor], factors, Costs(Topology.default(), MESH), 4.0)
    assert [(s.kind, s.axes) for s in graph.steps(both, major)] == [("AllGather", (B,))]
    assert len(graph.steps(both, minor)) > 1
    seconds = graph.seconds()
    assert np.isfinite(seconds).all()
    assert seconds[0, 1] < seconds[0, 2]
