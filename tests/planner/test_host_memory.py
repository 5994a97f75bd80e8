"""Without a limit and without a topology, what the ranks of this host hold together fits its
memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest

from onnxpar import api
from onnxpar.compiler.plan import Plan
from onnxpar.cost.topology import Topology
from onnxpar.planner import host_memory, memory_limit
from onnxpar.planner.host_memory import SHARE, bytes_of_all_ranks, host_bytes
from onnxpar.planner.options import Options
from onnxpar.planner.sharder import plan
from onnxpar.report.compare_trace import PlannedNode
from onnxpar.report.explain import explain

MODEL = Path(__file__).parents[2] / "models" / "gpt2.dynamo.static.onnx"


def planned(memory: int, monkeypatch: pytest.MonkeyPatch, **options: object) -> Plan:
    """The plan over four ranks on a host of so many bytes, beside what their processes take."""
    monkeypatch.setattr(memory_limit, "PROCESS", 0)
    monkeypatch.setattr(memory_limit, "host_bytes", lambda: memory)
    return plan(MODEL, Options(**({"devices": 4} | options)))[0]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fastest() -> Plan:
    """The plan where memory is no matter."""
    return plan(MODEL, Options(devices=4))[0]


@pytest.mark.slow
def test_a_small_host_has_the_weights_split(fastest: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = int(0.8 * bytes_of_all_ranks(fastest) / SHARE)
    made = planned(memory, monkeypatch)
    assert bytes_of_all_ranks(made) <= SHARE * memory < bytes_of_all_ranks(fastest)
    assert any("to fit the" in note for note in made.notes)


@pytest.mark.slow
def test_the_steps_of_a_plan_that_was_made_again_are_its_own(
    fastest: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = int(0.8 * bytes_of_all_ranks(fastest) / SHARE)
    monkeypatch.setattr(memory_limit, "host_bytes", lambda: memory)
    found = explain(MODEL, Options(devices=4))
    assert any("to fit the" in note for note in found.plan.notes)
    assert found.plan.predicted is not None
    assert found.predicted.total == pytest.approx(found.plan.predicted.total, rel=1e-12)


@pytest.mark.slow
def test_a_large_host_changes_nothing(fastest: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(int(bytes_of_all_ranks(fastest) / SHARE) + 1, monkeypatch)
    assert made.memory == fastest.memory and made.notes == fastest.notes


@pytest.mark.slow
def test_where_nothing_fits_the_plan_says_so(
    fastest: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(1000, monkeypatch)
    assert made.memory == fastest.memory
    assert any("the search found no strategy that fits" in note for note in made.notes)


def test_a_preset_is_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(1000, monkeypatch, preset="data-parallel")
    assert made.preset == "data-parallel"
    assert any("--preset tensor-parallel or --memory-limit" in note for note in made.notes)


@pytest.mark.slow
def test_a_topology_is_not_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(1000, monkeypatch, topology=Topology.default())
    assert not any("this host" in note for note in made.notes)


@pytest.mark.slow
def test_the_memory_of_a_device_in_a_topology(fastest: Plan) -> None:
    """Is a limit for the search, and a note where a preset decides."""
    needed = sum(fastest.memory.values())
    levels = [{"name": "host", "latency": "50 us", "bandwidth": "2 GB/s"}]
    half = {"levels": levels, "device": {"memory": f"{needed * 0.6} B"}}
    made, _ = plan(MODEL, Options(devices=4, topology=Topology.of(half)))
    assert sum(made.memory.values()) <= needed * 0.6
    assert any("of a device of the topology" in note for note in made.notes)
    kept, _ = plan(MODEL, Options(devices=4, topology=Topology.of(half), preset="data-parallel"))
    (note,) = [n for n in kept.notes if "of a device of the topology" in n]
    assert note.startswith("a rank needs") and "--preset tensor-parallel" in note
    large = half | {"device": {"memory": f"{needed} B"}}
    free, _ = plan(MODEL, Options(devices=4, topology=Topology.of(large)))
    assert not any("topology" in note for note in free.notes)


def test_tables_that_are_looked_up_count_once(fastest: Plan) -> None:
    tables = {lookup.table for lookup in fastest.lookups}
    whole = [w.bytes for w in fastest.weights if w.name in tables and w.bytes_per_rank == w.bytes]
    assert whole, "the model has a table of tokens"
    assert bytes_of_all_ranks(fastest) == 4 * sum(fastest.memory.values()) - 3 * sum(whole)


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\nMemFree: 5 kB\n")
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("500000\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    for names, wanted in ((["max"], 1024000), (["limit"], 500000), (["none"], 1024000)):
        monkeypatch.setattr(host_memory, "_CGROUPS", [tmp_path / name for name in names])
        assert host_bytes() == wanted
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "none")
    assert host_bytes() is None


class Compared(Exception):
    """Ends a comparison, whose trace is none."""


@pytest.mark.slow
def test_a_trace_is_compared_with_the_plan_that_was_made_last(
    fastest: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Plan, Mapping[str, PlannedNode]]] = []

    def compared(_: object, made: Plan, nodes: Mapping[str, PlannedNode]) -> NoReturn:
        seen.append((made, nodes))
        raise Compared

    memory = int(0.8 * bytes_of_all_ranks(fastest) / SHARE)
    monkeypatch.setattr(memory_limit, "host_bytes", lambda: memory)
    monkeypatch.setattr(api, "read_trace", lambda _: Mock(sizes=()))
    monkeypatch.setattr(api.comparing, "compare_trace", compared)
    with pytest.raises(Compared):
        api.compare_with_trace(MODEL, Options(devices=4), "trace.json")
    ((made, nodes),) = seen
    total = sum(node.predicted.total for node in nodes.values() if node.predicted)
    assert made.predicted is not None
    assert total == pytest.approx(made.predicted.total, rel=1e-12)
