"""Topology files and rank tables: what they say, and what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

from onnxpar.api import make_plan
from onnxpar.base.errors import StrategyError
from onnxpar.base.units import quantity, text_of
from onnxpar.cli.command_line import main
from onnxpar.cost.device import Rate
from onnxpar.cost.topology import HOST, NETWORK, Device, Level, Link, Session, Topology
from onnxpar.planner import sharder
from onnxpar.planner.options import Options

FILE = """
levels:  # from the inside out
  - name: host
    size: 4
    latency: 52.5 us
    bandwidth: 1.75 GB/s
    collectives:
      AllReduce: {latency: 60 us, bandwidth: 9e8}
  - {name: rack, latency: 1e-4, bandwidth: 1GB/s}
device:
  flops: 40 GFLOP/s
  memory: 16 GiB
  cache: 2 MB
  cache_bandwidth: 60 GB/s
  exposed: 0.5
  ops:
    Softmax: {row: 60 ns, element: 2 ns}
    Erf: {element: 0.5 ns}
"""
READ = Topology(
    (
        Level("host", 4, 52.5e-6, 1.75e9, {"AllReduce": Link(60e-6, 9e8)}),
        Level("rack", None, 1e-4, 1e9),
    ),
    Device(
        flops=4e10,
        memory=2.0**34,
        cache=2e6,
        cache_bandwidth=6e10,
        exposed=0.5,
        ops={"Softmax": Rate(6e-8, 2e-9), "Erf": Rate(0.0, 5e-10)},
    ),
)


ALONE = Device(9e10, 3e10, 2e-6, cache=1e6, cache_bandwidth=8e10)
SHARED = Topology(
    (Level("host", 16, 1e-5, 1e9, {"AllReduce": Link(2e-5, 4e9)}, at_once=4), READ.levels[-1]),
    Device(3e10, 1e10, 2e-6, row=1e-9, ops={"Erf": Rate(0.0, 2e-10)}),
    alone=ALONE,
    session=Session(4e-5, 5e9, 1e-5),
)


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE)
    assert Topology.read(file) == READ
    assert READ.ranks is None and READ.units() == [4]


@pytest.mark.parametrize("topology", [READ, Topology.default(), SHARED])
def test_what_is_written_reads_the_same(topology: Topology, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(topology.text())
    read = Topology.read(file)
    assert read.levels == topology.levels
    assert (read.alone, read.session) == (topology.alone, topology.session)
    assert replace(read.device, memory=None) == replace(topology.device, memory=None)
    assert (read.device.memory or 0) == pytest.approx(topology.device.memory or 0, rel=1e-5)


LEVEL = {"name": "host", "size": 2, "latency": "1 us", "bandwidth": "1 GB/s"}


@pytest.mark.parametrize(
    "data,message",
    [
        (None, "must be a mapping with the keys levels, device"),
        ([1], "must be a mapping with the keys levels, device"),
        ({}, "levels must be a list"),
        ({"levels": []}, "levels must be a list"),
        ({"level": [LEVEL]}, "unknown key 'level'; use levels, device"),
        ({"levels": ["host"]}, r"levels\[0\]: must be a mapping with the keys name, size"),
        ({"levels": [{**LEVEL, "speed": 1}]}, r"levels\[0\]: unknown key 'speed'"),
        ({"levels": [{**LEVEL, "name": ""}]}, r"levels\[0\]: name is missing"),
        ({"levels": [LEVEL, LEVEL]}, "two levels are named 'host'"),
        ({"levels": [{**LEVEL, "size": 0}]}, "size is 0; it must be an integer"),
        ({"levels": [{**LEVEL, "size": "2"}]}, "size is '2'"),
        ({"levels": [{**LEVEL, "size": True}]}, "size is True"),
        ({"levels": [{**LEVEL, "at_once": 0}]}, "at_once is 0; it must be an integer"),
        ({"levels": [LEVEL], "alone": {"flop": 1}}, "alone: unknown key 'flop'; use flops"),
        ({"levels": [LEVEL], "session": {"latency": 1}}, "session: bandwidth is missing"),
        ({"levels": [LEVEL], "session": {"rank": "x"}}, "session: "),
        (
            {"levels": [{**LEVEL, "size": None}, {**LEVEL, "name": "rack"}]},
            "level 'host' has no size, which only the outermost",
        ),
        (
            {"levels": [{**LEVEL, "latency": None}]},
            r"levels\[0\]: latency is missing; give it in s",
        ),
        ({"levels": [{**LEVEL, "latency": "fast"}]}, "'fast' is not a time; write 50us"),
        ({"levels": [{**LEVEL, "latency": "1 GB"}]}, "'1 GB' is not a time"),
        ({"levels": [{**LEVEL, "latency": -1}]}, "latency is -1; it must be at least 0"),
        ({"levels": [{**LEVEL, "bandwidth": 0}]}, "bandwidth is 0; it must be above 0"),
        ({"levels": [{**LEVEL, "bandwidth": ".inf"}]}, "is not a data rate; write 2GB/s"),
        (
            {"levels": [{**LEVEL, "collectives": {"Gather": {}}}]},
            "collectives: unknown key 'Gather'; use AllReduce",
        ),
        (
            {"levels": [{**LEVEL, "collectives": {"AllReduce": {"latency": 0}}}]},
            "AllReduce: bandwidth is missing",
        ),
        ({"levels": [LEVEL], "device": {"cores": 4}}, "device: unknown key 'cores'; use flops"),
        ({"levels": [LEVEL], "device": {"flops": "9 GB"}}, "write 20GFLOP/s"),
        ({"device": {"ops": {"Relu": {}}}}, "ops: unknown key 'Relu'; use Softmax, Layer"),
        ({"device": {"ops": {"Erf": {"time": 1}}}}, "Erf: unknown key 'time'; use row, element"),
        ({"device": {"ops": {"Erf": {"row": -1}}}}, "Erf: row is -1; it must be at least 0"),
        ({"levels": [LEVEL], "device": {"memory": True}}, "True is not a size; write 16GB"),
        ({"device": []}, "levels must be a list"),
        ({"levels": [LEVEL], "device": []}, "device: the list is empty"),
        ({"levels": [LEVEL], "device": [{}, {}, {}]}, "lists 3 devices, but there are 2 ranks"),
        (
            {"levels": [{**LEVEL, "device": [{"flops": 1}]}]},
            r"levels\[0\]: device: lists 1 devices, but there are 2 units in this level",
        ),
        (
            {"levels": [LEVEL, {**LEVEL, "name": "r", "size": None}], "device": [{"row": 0}] * 3},
            "lists 3 devices, which do not fill units of 2 ranks",
        ),
        (
            {
                "levels": [
                    {**LEVEL, "device": [{"flops": 1}, {"flops": 2}]},
                    {**LEVEL, "name": "rack", "size": None},
                ]
            },
            "devices differ, and level 'rack' has no size",
        ),
        ({"device": [{"flops": 1, "count": 0}]}, r"device\[0\]: count is 0; give a number from 1"),
        ({"device": [{"flop": 1}]}, r"device\[0\]: unknown key 'flop'; use flops"),
        ({"device": ["fast"]}, r"device\[0\]: must be a mapping with the keys flops"),
    ],
)
def test_what_is_wrong_is_named(data: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message) as error:
        Topology.of(data, "cluster.yaml")
    assert str(error.value).startswith("cluster.yaml: ")


FAST, SLOW = {"flops": 3e10}, {"flops": 1e10}


@pytest.mark.parametrize(
    "data,flops",
    [
        ({"device": [FAST, SLOW]}, [3, 1]),
        ({"device": [{**FAST, "count": 2}, SLOW]}, [3, 3, 1]),
        ({"levels": [LEVEL], "device": [FAST, SLOW]}, [3, 1]),
        ({"levels": [{**LEVEL, "device": [FAST, SLOW]}]}, [3, 1]),
        (
            {"levels": [LEVEL, {**LEVEL, "name": "rack", "device": [FAST, SLOW]}]},
            [3, 3, 1, 1],
        ),
        (
            {"levels": [{**LEVEL, "device": [FAST, SLOW]}, {**LEVEL, "name": "rack"}]},
            [3, 1, 3, 1],
        ),
        (  # an inner entry overrides an outer one
            {
                "levels": [
                    {**LEVEL, "device": [{"memory": 1}, SLOW]},
                    {**LEVEL, "size": None, "name": "rack", "device": [FAST, {"flops": 2e10}]},
                ]
            },
            [3, 1, 2, 1],
        ),
        ({"levels": [{**LEVEL, "size": None}], "device": [FAST, SLOW, FAST]}, [3, 1, 3]),
        ({"levels": [{**LEVEL, "device": FAST}], "device": {"flops": 5e9}}, [3, 3]),
    ],
)
def test_devices_of_ranks(data: Any, flops: list[float], tmp_path: Path) -> None:
    topology = Topology.of(data)
    assert topology.ranks == len(flops)
    found = [topology.device_of(rank).flops / 1e10 for rank in range(len(flops))]
    assert found == pytest.approx(flops)
    file = tmp_path / "mixed.yaml"
    file.write_text(topology.text())
    again = Topology.read(file)
    assert [again.device_of(rank) for rank in range(len(flops))] == [
        topology.device_of(rank) for rank in range(len(flops))
    ]


def test_a_device_alone_has_the_default_level() -> None:
    topology = Topology.of({"device": {"flops": "40 GFLOP/s"}})
    assert topology.levels == Topology.default().levels and topology.ranks is None
    assert topology.device == Device(flops=4e10)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"there is no file .*none\.yaml"):
        Topology.read(tmp_path / "none.yaml")
    for text, mistake in (
        ("{", "not JSON: Expecting property name"),
        ("levels:\n  - [", "not YAML: line 2, column 6: expected the node content"),
        ("\x00", "not YAML: character 1 is 0, which YAML does not allow"),
    ):
        file = tmp_path / "bad.yaml"
        file.write_text(text)
        with pytest.raises(StrategyError, match=rf"bad\.yaml: {mistake}") as error:
            Topology.read(file)
        assert "unicode string" not in str(error.value)


@pytest.mark.parametrize(
    "text,unit,value,written",
    [
        ("50 us", "s", 50e-6, "50 us"),
        ("3", "s", 3.0, "3 s"),
        (2e9, "B/s", 2e9, "2 GB/s"),
        ("1.5GB", "B", 1.5e9, "1.5 GB"),
        (346.318, "B", 346.318, "346 B"),
        ("512 MiB", "B", 2.0**29, "536.871 MB"),
        ("1e3", "FLOP/s", 1e3, "1 kFLOP/s"),
        ("0 s", "s", 0.0, "0 ns"),
    ],
)
def test_quantities(text: Any, unit: str, value: float, written: str) -> None:
    assert quantity(text, unit, "x") == pytest.approx(value, rel=1e-12)
    assert text_of(value, unit) == written


def servers(*hosts: list[int]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "server_count": str(len(hosts)),
        "server_list": [
            {
                "server_id": f"10.0.0.{i}",
                "device": [
                    {"device_id": str(d), "device_ip": f"192.1.{i}.{d}", "rank_id": str(rank)}
                    for d, rank in enumerate(ranks)
                ],
                "host_nic_ip": "reserve",
            }
            for i, ranks in enumerate(hosts)
        ],
        "status": "completed",
    }


def groups(*instances: tuple[str, int | None, int]) -> dict[str, Any]:
    """Instances of (server, rank, number of devices)."""
    return {
        "group_count": "1",
        "group_list": [
            {
                "group_name": "",
                "instance_list": [
                    {
                        "devices": [{"device_id": str(d)} for d in range(devices)],
                        "server_id": server,
                        **({} if rank is None else {"rank_id": str(rank)}),
                    }
                    for server, rank, devices in instances
                ],
            }
        ],
    }


IN_HOST = Level("host", 2, HOST.latency, HOST.bandwidth)
BETWEEN = Level("cluster", 2, NETWORK.latency, NETWORK.bandwidth)


@pytest.mark.parametrize(
    "table,levels",
    [
        (servers([0, 1], [2, 3]), (IN_HOST, BETWEEN)),
        (servers([2, 3], [1, 0]), (IN_HOST, BETWEEN)),
        (servers([0, 1]), (IN_HOST,)),
        (groups(("a", 0, 1), ("a", 1, 1), ("b", 2, 1), ("b", 3, 1)), (IN_HOST, BETWEEN)),
        (groups(("a", None, 2), ("b", None, 2)), (IN_HOST, BETWEEN)),
    ],
)
def test_rank_tables(table: Any, levels: tuple[Level, ...], tmp_path: Path) -> None:
    file = tmp_path / "rank_table.json"
    file.write_text(json.dumps(table))
    read = Topology.read(file)
    assert read.levels == levels and read.device == Device()


@pytest.mark.parametrize(
    "table,message",
    [
        (servers([0, 1], [2]), r"different numbers of ranks \(10.0.0.0: 2, 10.0.0.1: 1\)"),
        (
            servers([0, 2], [1, 3]),
            r"10.0.0.0 has the ranks \[0, 2\]; give each server consecutive ranks",
        ),
        (servers([0, 1], [1, 2]), r"rank_ids are \[0, 1, 1, 2\]; use each number from 0"),
        (servers(), r"rank_ids are \[\]"),
        (
            {"server_list": [{"server_id": "a"}]},
            r"rank table is incomplete or has a wrong value \(KeyError\('device'\)\)",
        ),
        ({"server_list": [1]}, "rank table is incomplete"),
        ({"server_list": [{"server_id": "a", "device": [{"rank_id": "x"}]}]}, "incomplete"),
        (
            {"server_list": [{"server_id": "a", "device": [{"rank_id": float("inf")}]}]},
            "infinity to integer",
        ),
        (groups(("a", 0, 2)), r"rank_ids are \[0, 0\]"),
    ],
)
def test_rank_tables_that_are_wrong(table: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Topology.of(table, "rank_table.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    m (float[8, 16] x) => (float[8, 16] y) { y = Relu (x) }"""
    path = tmp_path_factory.mktemp("topology") / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def test_a_plan_is_made_for_the_topology(model: Path) -> None:
    _, ctx = sharder.plan(model, Options(devices=8, topology=READ))
    assert ctx.sharding.costs.topology is READ
    assert ctx.sharding.costs.mesh is ctx.sharding.mesh
    _, ctx = sharder.plan(model, Options(devices=8))
    assert ctx.sharding.costs.topology == Topology.default()
    with pytest.raises(StrategyError, match="the topology has 2 ranks, but the mesh has 8"):
        make_plan(model, devices=8, topology={"levels": [LEVEL]})


def test_it_is_given_as_a_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE)
    command = ["plan", str(model), "--preset", "data-parallel", "--topology", str(file)]
    assert main([*command, "--devices", "8"]) == 0
    file.write_text("levels: [{name: host, size: 2, latency: 1 us, bandwidth: 1 GB/s}]")
    assert main([*command, "--devices", "4"]) == 2
    assert "the topology has 2 ranks, but the mesh has 4" in capsys.readouterr().err
    command[command.index("data-parallel")] = "manual"
    assert main([*command, "--devices", "2"]) == 2
    assert "--topology" in capsys.readouterr().err


def test_the_file_in_the_docs_is_read() -> None:
    text = (Path(__file__).parents[2] / "docs/how-to/topology.md").read_text()
    block = text[text.index("\nlevels:\n") + 1 :]
    lines = takewhile(lambda line: not line.startswith("```"), block.splitlines())
    read = Topology.of(yaml.safe_load("\n".join(lines)), "docs/how-to/topology.md")
    assert [level.name for level in read.levels] == ["host", "rack", "cluster"]
    assert read.units() == [8, 32] and read.ranks is None
    assert read.device == Device(1e11, 1.2e10, 1e-6, 1.6e10, 6e10, 8e-9, 16)


def test_more_ranks_than_a_host_runs_at_once_take_turns() -> None:
    """12 of which 4 run: everything takes three times as long, in hosts but not between them, and
    those that wait must be woken."""
    found = SHARED.for_ranks(12)
    assert found.turns == 3 and found.levels[1] == SHARED.levels[1]
    host = found.levels[0]
    assert (host.latency, host.bandwidth) == pytest.approx((3 * (4e-5 + 4 * 1e-5), 1e9 / 3))
    link = found.levels[0].link("AllReduce")
    assert (link.latency, link.bandwidth) == pytest.approx((3 * 8e-5, 4e9 / 3))
    slow = replace(SHARED, session=None).for_ranks(12).levels[0]
    assert slow.latency == pytest.approx(3e-5), "nobody knows how long it takes to wake them"
    device = found.device
    assert [device.flops, device.memory_bandwidth, device.launch, device.row] == pytest.approx(
        [1e10, 1e10 / 3, 6e-6, 3e-9]
    )
    assert device.ops["Erf"].element == pytest.approx(6e-10)
    assert found.session is not None and found.session.latency == pytest.approx(4e-5 + 12 * 1e-5)
    assert found.for_ranks(12) is found, "it is not slowed twice"
    assert SHARED.for_ranks(64).turns == 4, "of ranks on several hosts, 16 share one"
    assert replace(SHARED, levels=READ.levels).for_ranks(99).device == SHARED.device


@pytest.mark.parametrize("ranks,flops", [(1, 9e10), (2, (9e10 * 3e10) ** 0.5), (4, 3e10)])
def test_few_ranks_have_more_cores_each(ranks: int, flops: float) -> None:
    found = SHARED.for_ranks(ranks)
    assert found.device.flops == pytest.approx(flops) and found.turns == 1
    assert found.levels[0].latency == 1e-5


def test_ranks_that_take_turns_and_what_does_not_pay_are_told(tmp_path: Path) -> None:
    """By the quantities of a host: 16 MiB are copied, in and out of a session, and in an op."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    m (float[8, 524288] x) => (float[8, 524288] y) { y = Neg (x) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    device = Device(1e12, 1e10, 1e-6)
    host = Topology(
        (Level("host", None, 1e-5, 1e9, at_once=2),),
        device,
        alone=Device(1e12, 2e10, 1e-6),
        session=Session(1e-3, 8e9, 1e-4),
    )
    size = 4 * 8 * 524288
    for ranks, turns in ((2, 1), (8, 4)):
        plan = make_plan(tmp_path / "m.onnx", devices=ranks, preset="data-parallel", topology=host)
        found = plan.predicted
        assert found is not None
        assert found.one_rank == pytest.approx(1e-6 + 2 * size / 2e10)
        assert found.compute == pytest.approx(turns * (1e-6 + 2 * size / ranks / 1e10))
        assert found.session == pytest.approx(1e-3 + ranks * 1e-4 + turns * 2 * size / 8e9)
        assert found.total == found.compute + found.communication + found.session
        told = str(plan)
        assert f"and {found.session * 1e3:.3f} session" in told
        assert ("a host runs 2 ranks at a time, and 8 take turns" in told) == (ranks == 8)
        assert "splitting does not pay here" in " ".join(told.split())
    assert plan.to_json()["predicted"]["session"] == found.session
