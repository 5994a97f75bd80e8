"""Machines by name instead of a topology file."""

from __future__ import annotations

from pathlib import Path

import pytest

import onnxpar
from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.cost.topology import Topology

MODEL = Path(__file__).parents[2] / "models" / "gpt2.dynamo.static.onnx"


def given(name: str, ranks: int | None) -> Topology:
    topology = Topology.from_argument(name, ranks)
    assert topology is not None
    return topology


@pytest.mark.parametrize("name", ["8x64-core,25GbE", "8x64 cores, 25GbE", "8x64core,25GbE"])
@pytest.mark.parametrize(("ranks", "here"), [(512, 64), (8, 1), (12, 2), (None, 64), (4096, 512)])
def test_ranks_are_spread_over_hosts_and_share_their_networks(
    name: str, ranks: int | None, here: int
) -> None:
    found = given(name, ranks)
    assert [level.size for level in found.levels] == [here, 8]
    assert found.levels[1].bandwidth * here == pytest.approx(0.9 * 25e9 / 8)
    assert found.device.memory == pytest.approx(64 * 4e9 / here)
    assert found.for_ranks(ranks or 512).turns == max(here / 64, 1)
    assert name in found.origin


def test_one_rank_of_a_host_has_all_its_cores() -> None:
    few, many = (given("2x16-core,10GbE", ranks).for_ranks(ranks).device for ranks in (2, 32))
    assert few.flops == pytest.approx(0.8 * 16 * many.flops)
    assert few.memory_bandwidth == pytest.approx(16 * many.memory_bandwidth)


def test_one_host_needs_no_network() -> None:
    assert len(given("64-core", 8).levels) == 1
    assert onnxpar.plan(MODEL, devices=8, topology="64-core").predicted is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("8x64-core", "give the network between the hosts, such as 8x64-core,25GbE"),
        ("8x64-core,40GbE", "it is one of 1GbE, 10GbE"),
        ("0x64-core,1GbE", "give numbers from 1 to 65,536"),
        ("8x64-cor", "there is no file 8x64-cor"),
    ],
)
def test_mistakes(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(MODEL), "--devices", "8", "--topology", name]) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_this_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("64-core").write_text(Topology.default().text())
    assert given("64-core", 8) == Topology.default()


def test_a_faster_network_never_makes_a_plan_slower() -> None:
    def total(network: str) -> float:
        made = onnxpar.plan(
            MODEL, devices=4, topology=f"4x2-core,{network}", preset="tensor-parallel"
        )
        assert made.predicted is not None
        return made.predicted.total

    times = [total(network) for network in ("1GbE", "10GbE", "100GbE")]
    assert times == sorted(times, reverse=True) and times[0] > 1.1 * times[2]


def test_a_mesh_says_how_many_ranks_there_are() -> None:
    assert onnxpar.plan(MODEL, mesh="dp=4,tp=4", topology="4x4-core,10GbE").mesh.size == 16
    with pytest.raises(StrategyError, match="network"):
        onnxpar.plan(MODEL, mesh="dp=4,tp=4", topology="4x4-core")
