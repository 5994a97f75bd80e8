"""Between hosts goes only what must: axes that a placement does not use share the work."""

from __future__ import annotations

import pytest

from onnxpar.cost.cost import Costs
from onnxpar.cost.topology import Topology
from onnxpar.layout.layout import Factor
from onnxpar.layout.mesh import Mesh
from onnxpar.sharding.factors import Leaf, TensorFactors
from onnxpar.sharding.reshard_graph import ReshardGraph
from onnxpar.sharding.reshard_planner import ReshardedTensor, plan_steps
from onnxpar.sharding.state import FactorSharding

MESH = Mesh((("dp", 4), ("tp", 8)))
DP, TP = MESH.axis("dp"), MESH.axis("tp")
HOSTS = Topology.of(
    {
        "levels": [
            {"name": "host", "size": 8, "latency": "1 us", "bandwidth": "100 GB/s"},
            {"name": "cluster", "latency": "10 us", "bandwidth": "1 GB/s"},
        ],
        "device": {"memory_bandwidth": "500 GB/s", "launch": "1 us"},
    }
)
MATRIX = TensorFactors((Factor(512), Factor(1024)), (Leaf(0, 512), Leaf(1, 1024)), (0, 1))
WHOLE = FactorSharding(((), ()))
ROWS = FactorSharding(((DP,), ()))


def kinds(start: FactorSharding, topology: Topology, factors: TensorFactors = MATRIX) -> list[str]:
    steps = plan_steps(start, WHOLE, ReshardedTensor(factors, Costs(topology, MESH)))
    return [f"{step.kind} {'.'.join(axis.name for axis in step.axes)}" for step in steps]


@pytest.mark.parametrize(
    ("start", "steps"),
    [
        (ROWS, ["LocalSlice tp", "AllGather dp.tp"]),
        (
            FactorSharding(((), ()), (DP,)),
            ["LocalSlice tp", "ReduceScatter dp", "AllToAll tp", "AllGather dp.tp"],
        ),
        (FactorSharding(((), ()), (DP, TP)), ["AllReduce dp.tp"]),
    ],
)
def test_hosts_send_each_other_parts(start: FactorSharding, steps: list[str]) -> None:
    """Collectives over hosts do so themselves."""
    assert kinds(start, HOSTS) == steps


def test_where_all_links_are_alike_nothing_goes_a_longer_way() -> None:
    assert kinds(ROWS, Topology.default()) == ["AllGather dp"]
    assert kinds(FactorSharding(((), ()), (DP, TP)), Topology.default()) == ["AllReduce dp.tp"]


def test_nothing_takes_less_than_no_time_where_sizes_are_not_known() -> None:
    """Rows that only data decide: they count as one."""
    rows = TensorFactors((Factor(-1), Factor(48)), (Leaf(0, 48),), (1,))
    mesh = Mesh.parse("tp=16")
    tp = (mesh.axis("tp"),)
    wanted = [FactorSharding(((),)), FactorSharding((tp,)), FactorSharding(((),), tp)]
    found = ReshardGraph(wanted, rows, Costs(Topology.default(), mesh), 4)
    assert (found.graph.data > 0).all()
    assert found.sizes[0].bytes.max() == 48 * 4
