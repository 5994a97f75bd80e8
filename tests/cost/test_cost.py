"""What collectives cost, by the links that their groups cross."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxpar.base.errors import StrategyError
from onnxpar.cost.cost import (
    DIRECT_BYTES,
    SCATTERED_BYTES,
    SPARE_BYTES,
    Costs,
    Spread,
    messages,
    stages,
)
from onnxpar.cost.device import Rate
from onnxpar.cost.topology import Device, Level, Link, Topology
from onnxpar.layout.layout import Concat, Dim, Factor, Product
from onnxpar.layout.mesh import Axes, Axis, Mesh
from onnxpar.layout.rows import rows_moved, rows_within
from onnxpar.planner.context import load_model, make_context
from onnxpar.planner.options import Options
from onnxpar.search.op_cost import op_cost
from onnxpar.search.op_strategies import partial_kinds, strategies_of

HOSTS = Topology(
    (
        Level("host", 4, 1e-6, 8e9),
        Level("rack", 2, 1e-5, 2e9),
        Level("cluster", None, 1e-4, 1e9, {"AllGather": Link(5e-4, 5e8)}),
    ),
    Device(flops=1e9, memory_bandwidth=1e8, launch=1e-6, convolution=5e8, row=1e-9),
)


def axes(mesh: Mesh, *names: str) -> Axes:
    return tuple(mesh.axis(name) for name in names)


@pytest.mark.parametrize(
    "mesh,over,level",
    [
        ("tp=4", ["tp"], "host"),
        ("dp=2,tp=4", ["tp"], "host"),
        ("dp=2,tp=4", ["dp"], "rack"),
        ("dp=2,tp=4", ["dp", "tp"], "rack"),
        ("dp=4,tp=2", ["tp"], "host"),
        ("dp=4,tp=2", ["dp"], "rack"),
        ("dp=4,tp=4", ["dp"], "cluster"),
        ("pp=2,dp=2,tp=4", ["dp"], "rack"),
        ("pp=2,dp=2,tp=4", ["pp"], "cluster"),
        ("dp=2,tp=3", ["tp"], "rack"),  # ranks 3, 4 and 5 stand in two hosts
        ("dp=3,tp=2", ["dp"], "rack"),
        ("dp=2,tp=6", ["tp"], "cluster"),
        ("dp=64,tp=64", ["tp"], "cluster"),
    ],
)
def test_a_group_goes_over_the_outermost_level_that_any_such_group_crosses(
    mesh: str, over: list[str], level: str
) -> None:
    on = Mesh.parse(mesh)
    assert Costs(HOSTS, on).level(axes(on, *over)).name == level


def test_parts_of_an_axis_may_stay_inside_where_all_of_it_does_not() -> None:
    costs = Costs(HOSTS, Mesh.parse("dp=16"))
    inside, middle, across = Axis("dp", 4, 4), Axis("dp", 2, 2), Axis("dp", 2, 1)
    assert costs.level((inside,)).name == "host"
    assert costs.level((middle,)).name == "rack"
    assert costs.level((across,)).name == "cluster"
    assert costs.level((across, inside)).name == "cluster"
    assert costs.collective("AllReduce", (inside,), 4096) == 1e-6 + 3 * 4096 / 8e9


MIB = 1 << 20


@pytest.mark.parametrize(
    "kind,ranks,size,rounds,sent",
    [
        ("AllReduce", 2, 4096, 1, 4096),
        ("AllReduce", 4, 131072, 1, 393216),  # to each of 3: the most that goes in one round
        ("AllReduce", 4, 131076, 2, 196614),
        ("AllReduce", 2, MIB, 2, MIB),
        ("ReduceScatter", 4, MIB, 1, 786432),
        ("AllGather", 4, MIB, 1, 786432),
        ("AllToAll", 8, MIB, 1, 917504),
        ("Broadcast", 2, MIB, 1, MIB),
        ("Broadcast", 5, 65536, 1, 262144),
        ("Broadcast", 5, MIB, 2, 1.75 * MIB),  # a quarter to each, who pass it on to 3
        ("Send", 2, MIB, 1, MIB),
        ("NeighborExchange", 4, 100, 1, 100),
    ],
)
def test_what_is_sent_in_how_many_rounds(
    kind: str, ranks: int, size: int, rounds: int, sent: float
) -> None:
    assert messages(kind, ranks, size) == (rounds, sent)


def test_the_plugin_changes_algorithms_where_the_costs_do() -> None:
    source = Path(__file__).parents[2] / "onnxpar/native/message_transport.cc"
    found = dict(re.findall(r"size_t (k\w+) = (\d+) \* 1024;", source.read_text()))
    assert int(found["kDirectBytes"]) * 1024 == DIRECT_BYTES
    assert int(found["kScatteredBytes"]) * 1024 == SCATTERED_BYTES
    assert int(found["kSpareBytes"]) * 1024 == SPARE_BYTES


@pytest.mark.parametrize(
    ("kind", "locals", "hosts", "size", "inside", "between"),
    [
        # A sum of each host crosses the link in each direction, divided among its ranks.
        ("AllReduce", 4, 2, 64e6, (2, 2 * 48e6), (2, 16e6)),
        ("AllReduce", 2, 3, 6e6, (2, 6e6), (2, 4e6)),
        ("AllReduce", 4, 2, 1000, (1, 3000), (1, 1000)),
        ("AllReduce", 4, 2, SPARE_BYTES / 3, (1, SPARE_BYTES), (1, SPARE_BYTES / 3)),
        ("AllReduce", 4, 2, SPARE_BYTES / 3 + 16, (2, 32792), (2, 5465)),
        ("AllReduce", 1, 4, 1e6, (0, 0), (2, 1.5e6)),
        ("ReduceScatter", 4, 2, 8e6, (1, 6e6), (1, 1e6)),
        ("AllGather", 2, 4, 8e6, (1, 4e6), (1, 3e6)),
        ("AllToAll", 4, 2, 8e6, (0, 3e6), (1, 4e6)),
        ("Broadcast", 4, 2, 8e6, (1, 6e6), (1, 8e6)),
        ("Broadcast", 4, 3, 1000, (1, 750), (1, 2000)),
        ("Broadcast", 4, 3, 8e6, (1, 6e6), (2, 9e6)),
        ("CollectivePermute", 4, 2, 100, (0, 0), (1, 100)),
    ],
)
def test_what_is_sent_inside_hosts_and_between_them(
    kind: str,
    locals: int,
    hosts: int,
    size: float,
    inside: tuple[int, float],
    between: tuple[int, float],
) -> None:
    found = stages(kind, Spread(locals, hosts), size)
    assert [stage[0] for stage in found] == [inside[0], between[0]]
    assert found[0][1] == pytest.approx(inside[1], rel=1e-3)
    assert found[1][1] == pytest.approx(between[1], rel=1e-3)


@pytest.mark.parametrize(
    ("mesh", "over", "spread"),
    [
        ("pp=2,dp=2,tp=4", ("tp",), Spread(4, 1)),
        ("pp=2,dp=2,tp=4", ("dp",), Spread(1, 2)),
        ("pp=2,dp=2,tp=4", ("dp", "tp"), Spread(4, 2)),
        ("pp=2,dp=2,tp=4", ("pp", "tp"), Spread(4, 2)),
        ("dp=16", ("dp",), Spread(4, 4)),
        ("dp=2,tp=3", ("tp",), Spread(2, 2)),  # ranks 3 to 5: one on the first host
    ],
)
def test_groups_are_spread_over_hosts(mesh: str, over: tuple[str, ...], spread: Spread) -> None:
    made = Mesh.parse(mesh)
    assert Costs(HOSTS, made).spread(axes(made, *over)) == spread


def test_a_group_on_several_hosts_costs_the_slower_of_two_stages() -> None:
    """The link is 8e9 bytes per second inside, 2e9 between; each rank sends an eighth twice."""
    mesh = Mesh.parse("dp=2,tp=4")
    costs = Costs(HOSTS, mesh)
    both = axes(mesh, "dp", "tp")
    inside, between = 2 * 0.75 * 64e6 / 8e9, 2 * 8e6 / 2e9
    assert costs.collective("AllReduce", both, 64e6) == pytest.approx(
        2e-6 + 2e-5 + max(inside, between), rel=1e-12
    )
    slower = Costs(replace(HOSTS, levels=(replace(HOSTS.levels[0]), *_slow(HOSTS))), mesh)
    assert slower.collective("AllReduce", both, 64e6) == pytest.approx(
        2e-6 + 2e-5 + 2 * 8e6 / 1e8, rel=1e-12
    )


def _slow(topology: Topology) -> tuple[Level, ...]:
    return tuple(replace(level, bandwidth=1e8) for level in topology.levels[1:])


def test_idle_seconds_are_those_of_the_link_between_hosts() -> None:
    mesh = Mesh.parse("dp=2,tp=4")
    costs = Costs(replace(HOSTS, levels=(HOSTS.levels[0], *_slow(HOSTS))), mesh)
    idle = costs.idle("AllReduce", [range(8)], 64e6)
    assert 0 < idle < costs.collective("AllReduce", axes(mesh, "dp", "tp"), 64e6)
    assert costs.idle("AllReduce", [range(4)], 64e6) == 0


@pytest.mark.parametrize(
    "kind,over,seconds",
    [
        ("AllReduce", "tp", 2e-6 + 1.5e6 / 8e9),
        ("AllReduce", "dp", 2e-5 + 1e6 / 2e9),
        ("AllReduce", "pp", 2e-4 + 1e6 / 1e9),
        ("AllGather", "dp", 1e-5 + 0.5e6 / 2e9),
        ("AllGather", "pp", 5e-4 + 0.5e6 / 5e8),  # a link of its own
        ("ReduceScatter", "pp", 1e-4 + 0.5e6 / 1e9),
    ],
)
def test_latency_for_each_round_and_bytes_over_the_slowest_link(
    kind: str, over: str, seconds: float
) -> None:
    mesh = Mesh.parse("pp=2,dp=2,tp=4")
    costs = Costs(HOSTS, mesh)
    assert costs.collective(kind, axes(mesh, over), 1e6) == pytest.approx(seconds, rel=1e-12)
    assert costs.step(kind, axes(mesh, over), 1e6) == costs.collective(kind, axes(mesh, over), 1e6)


def test_many_sizes_cost_what_each_costs() -> None:
    sizes = np.array([0.0, 8.0, DIRECT_BYTES, DIRECT_BYTES + 1.0, 1e6, 1e9])
    costs = Costs(Topology.default(), Mesh.parse("dp=4,tp=2"))
    for axis in ("dp", "tp"):
        over = axes(costs.mesh, axis)
        for kind in ("AllReduce", "ReduceScatter", "AllGather", "AllToAll"):
            each = [costs.collective(kind, over, size) for size in sizes.tolist()]
            assert costs.steps(kind, over, sizes.tolist()) == each
    assert not any(costs.steps("AllReduce", (), sizes.tolist()))


def test_alone_a_rank_does_not_talk() -> None:
    mesh = Mesh.parse("dp=1")
    assert Costs(HOSTS, mesh).collective("AllReduce", axes(mesh, "dp"), 1e9) == 0.0
    assert Costs(HOSTS, mesh).collective("AllReduce", (), 1e9) == 0.0


def test_cuts_are_copies_and_ops_have_a_roofline() -> None:
    costs = Costs(HOSTS, Mesh.parse("tp=4"))
    tp = axes(costs.mesh, "tp")
    assert costs.local("LocalSlice", 1e6) == costs.step("LocalSlice", tp, 1e6) == 1e-6 + 1e-2
    assert costs.compute(1e9, 1e6) == 1e-6 + 1.0  # of computing
    assert costs.compute(1e6, 1e8) == 1e-6 + 1.0  # of memory
    assert costs.compute(0, 0) == 1e-6
    assert costs.compute(1e9, 1e6, convolves=True) == 1e-6 + 2.0
    assert Costs(Topology.default(), Mesh.parse("tp=2")).compute(2e10, 0, True) == 1 + 5e-6
    assert costs.rows(1000) == pytest.approx(1e-6)
    assert Costs(Topology.default(), costs.mesh).rows(1000) == pytest.approx(1e-5)  # of 100 bytes


def test_there_are_as_many_ranks_as_the_mesh_has() -> None:
    full = Topology((Level("host", 4, 1e-6, 8e9), Level("rack", 2, 1e-5, 2e9)))
    Costs(full, Mesh.parse("dp=8"))
    message = r"the topology has 8 ranks, but the mesh has 9; .* 'rack'"
    with pytest.raises(StrategyError, match=message):
        Costs(full, Mesh.parse("dp=9"))
    Costs(HOSTS, Mesh.parse("dp=4096"))  # the outermost level grows


@pytest.mark.parametrize(
    "before,after,rows",
    [
        ((0, 1, 0), (0, 0, 0), 8),  # one for each index before
        ((1, 0, 0), (0, 0, 0), 1),
        ((1, 0, 0), (0, 0, 1), 1 + 8 * 6),
        ((0, 0, 1), (0, 0, 1), 0),
    ],
)
def test_rows_are_the_runs_that_a_step_moves(
    before: Sequence[int], after: Sequence[int], rows: int
) -> None:
    mesh = Mesh.parse("tp=2")

    def dims(split: Sequence[int]) -> list[Dim]:
        tp = (mesh.axis("tp"),)
        return [
            Factor(n, tp if is_split else ()) for n, is_split in zip((8, 6, 4), split, strict=True)
        ]

    assert rows_moved(dims(before), dims(after)) == rows


def test_rows_within_a_dimension() -> None:
    mesh = Mesh.parse("tp=2")
    tp = (mesh.axis("tp"),)
    assert rows_within(Factor(6, tp)) == 1
    assert rows_within(Product((Factor(3), Factor(4, tp)))) == 3
    assert rows_within(Product((Factor(4, tp), Factor(3)))) == 1
    assert rows_within(Concat((Factor(1), Factor(6, tp)))) == 4  # picked one by one


FLAT = Topology(
    (Level("host", None, 1.0, 1e3),), Device(flops=1e3, memory_bandwidth=1e6, launch=1e-3, row=0)
)


def work_of(text: str, path: Path, split: str) -> tuple[float, float]:
    """What the one node of a model takes where that factor is split over two ranks."""
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}'), path)
    options = Options(mesh=Mesh.parse("tp=2"), preset="tensor-parallel", topology=FLAT)
    model = load_model(path, options)
    sharding = make_context(model, options).sharding
    (op,) = sharding.factors.ops
    (found,) = [
        choice
        for choice in strategies_of(op, sharding, partial_kinds([op]))
        if split in {leaf.factor for leaf, a in zip(op.leaves, choice.axes, strict=True) if a}
    ]
    return op_cost(op, found, sharding)


LSTM = """m (float[{0},3,4] x, float[1,32,4] w, float[1,32,8] r) => (float[{0},1,3,8] y)
{{ y = LSTM <hidden_size = 8> (x, w, r) }}"""


@pytest.mark.parametrize("steps", [10, 20])
def test_a_recurrence_talks_in_every_step(steps: int, tmp_path: Path) -> None:
    flops = 2 * steps * 3 * 32 * (4 + 8) / 2
    compute, talk = work_of(LSTM.format(steps), tmp_path / "m.onnx", "h")
    assert talk == pytest.approx(steps * (1.0 + 3 * 8 * 4 / 2 / 1e3))
    lowered = (4 * steps - 1) * (1e-3 + 2 * 3 * 4 * 4 / 1e6)  # reads and writes what each makes
    assert compute == pytest.approx(1e-3 + flops / 1e3 + lowered, rel=1e-9)
    assert work_of(LSTM.format(steps), tmp_path / "m.onnx", "b")[1] == 0.0


def test_a_softmax_across_parts_is_several_ops_and_two_rounds(tmp_path: Path) -> None:
    text = "m (float[6,8] x) => (float[6,8] y) { y = Softmax <axis = 1> (x) }"
    compute, talk = work_of(text, tmp_path / "m.onnx", "d1")
    assert talk == pytest.approx(2 * (1.0 + 6 * 4 / 1e3))
    assert compute == pytest.approx(4 * (1e-3 + 2 * 6 * 4 * 4 / 1e6))
    assert work_of(text, tmp_path / "m.onnx", "d0") == pytest.approx((1e-3 + 192 / 1e6, 0.0))


def test_a_window_across_parts_fetches_an_edge(tmp_path: Path) -> None:
    text = """m (float[1,2,8,8] x) => (float[1,2,8,8] y)
    { y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x) }"""
    compute, talk = work_of(text, tmp_path / "m.onnx", "h0")
    part = 2 * 4 * 8 * 4
    assert talk == pytest.approx(1.0 + part / 4 / 1e3)
    assert compute == pytest.approx(2 * (1e-3 + 2 * part / 1e6))  # and a copy


def test_what_a_cache_holds_moves_faster() -> None:
    device = Device(memory_bandwidth=1e9, cache=1e6, cache_bandwidth=1e10, launch=0.0)
    costs = Costs(replace(FLAT, device=device), Mesh.parse("tp=2"))
    assert costs.compute(0, 5e5) == pytest.approx(5e-5)
    assert costs.compute(0, 3e6) == pytest.approx(1e-4 + 2e-3)
    assert costs.compute(0, 5e5, far=2e5) == pytest.approx(3e-5 + 2e-4)
    assert costs.memory(5e5) == costs.local("Slice", 5e5) == pytest.approx(5e-5)
    without = Costs(replace(FLAT, device=replace(device, cache=None)), Mesh.parse("tp=2"))
    assert without.compute(0, 5e5, far=2e5) == without.compute(0, 5e5) == pytest.approx(5e-4)


def test_a_product_waits_for_its_operands() -> None:
    """It computes for 3 ms, and reads for 2 ms, or computes for 3 and reads for 5."""
    device = Device(1e9, 1e9, launch=0.0, cache=1.0, cache_bandwidth=1e12)
    for exposed, less, more in ((None, 3e-3, 5e-3), (0.25, 3.5e-3, 5.75e-3), (1.0, 5e-3, 8e-3)):
        given = replace(device, exposed=exposed)
        costs = Costs(replace(FLAT, device=given), Mesh.parse("tp=2"))
        assert costs.compute(3e6, 2e6, far=2e6) == pytest.approx(less)
        assert costs.compute(3e6, 5e6, far=5e6) == pytest.approx(more)
        assert costs.compute(0, 5e6, far=5e6) == pytest.approx(5e-3)


def test_kinds_of_ops_take_longer_than_their_bytes() -> None:
    costs = Costs(
        replace(FLAT, device=Device(ops={"Softmax": Rate(1e-3, 1e-6)})), Mesh.parse("tp=2")
    )
    assert costs.beyond("Softmax", 3, 50) == pytest.approx(3e-3 + 5e-5)
    assert costs.beyond("Erf", 3, 50) == 0.0
