"""Collectives in two ops, with what is independent in between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import check_agrees, check_outputs, run_ranks, run_unsplit
from small_models import HEAD, write_text

from onnxpar.base.errors import StrategyError
from onnxpar.cost.cost import Costs
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.strategy.strategy import Strategy

BRANCHES = """branches (float[5,6] x, float[6,3] w1, float[5,4] b, float[4,3] w2) => (float[5,3] z)
{ y = MatMul(x, w1)  c = Exp(b)  d = MatMul(c, w2)  e = Tanh(d)  z = Max(y, e) }"""
FUSED = """fused (float[5,6] x, float[6,3] w1, float[4,5] b, float[4,3] w2, float[3] w3)
=> (float[5,3] z) { y = MatMul(x, w1)  c = Transpose<perm = [1, 0]>(b)  d = MatMul(c, w2)
  e = Add(d, w3)  f = Exp(e)  z = Max(y, f) }"""
CHAIN = """chain (float[5,6] x, float[6,3] w1) => (float[5,3] z)
{ y = MatMul(x, w1)  c = Exp(y)  z = Tanh(c) }"""
OUTPUT = """output (float[5,6] x, float[6,3] w1, float[5,4] b) => (float[5,3] y, float[5,4] c)
{ y = MatMul(x, w1)  c = Exp(b) }"""
CROSSED = """crossed (float[5,6] x, float[6,3] w1, float[5,6] u, float[6,3] w2) => (float[5,3] z)
{ a = MatMul(x, w1)  b = MatMul(u, w2)  c = Tanh(a)  d = Exp(b)  z = Max(c, d) }"""
ACROSS = """across (float[5,6] x, float[6,3] w1, float[5,6] u, float[6,3] w2) => (float[5,3] z)
{ a = MatMul(x, w1)  b = MatMul(u, w2)  c = Tanh(b)  d = Exp(c)  z = Max(a, d) }"""
IN_A_BODY = """body (float[5,6] x, float[6,3] w1, bool t) => (float[5,3] z)
{ y = MatMul(x, w1)
  e = If (t) <then_branch = a () => (float[5,3] p) { p = Exp(y) },
              else_branch = b () => (float[5,3] q) { q = Tanh(y) }>
  z = Max(e, e) }"""


def options(
    ranks: int, strategy: Mapping[str, Any], overlap: str, mesh_: str | None = None
) -> Options:
    """How to split a model over ranks."""
    mesh = Mesh.parse(mesh_ or f"tp={ranks}")
    return Options(mesh=mesh, strategy=Strategy.of(strategy), overlap=overlap, check_layouts=True)


def ops_in(folder: Path) -> list[str]:
    graph = onnx.load(folder / "model.par" / "rank_0000.onnx", load_external_data=False).graph
    return [node.op_type for node in graph.node]


def split(text: str, folder: Path, ranks: int = 2) -> list[str]:
    """The ops of a rank, whose results agree with those of the unsplit model."""
    model = write_text(HEAD + text, folder / "m.onnx")
    strategy = {"tensors": {name: [None, "tp"] for name in ("x", "u") if f"] {name}," in text}}
    check_agrees(model, folder, options(ranks, strategy, "on"))
    return ops_in(folder)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_branch_hides_the_sum_of_another(ranks: int, tmp_path: Path) -> None:
    ops = split(BRANCHES, tmp_path, ranks)
    if ranks > 1:
        assert ops == [
            *("MatMul", "StartAllReduce", "Exp", "Gate", "MatMul", "Tanh"),
            *("After", "Complete", "Max"),
        ]


def test_no_gate_between_nodes_that_onnxruntime_fuses(tmp_path: Path) -> None:
    assert split(FUSED, tmp_path) == [
        *("MatMul", "StartAllReduce", "Transpose", "MatMul", "Add", "Gate", "Exp"),
        *("After", "Complete", "Max"),
    ]


def test_nothing_in_between(tmp_path: Path) -> None:
    assert "Complete" not in split(CHAIN, tmp_path)


def test_a_result_that_no_node_reads_is_complete_at_the_end(tmp_path: Path) -> None:
    assert split(OUTPUT, tmp_path) == ["MatMul", "StartAllReduce", "Exp", "Complete"]


def test_the_second_hides_behind_the_reader_of_the_first(tmp_path: Path) -> None:
    ops = split(CROSSED, tmp_path)
    at = [i for i, op in enumerate(ops) if op == "StartAllReduce"]
    assert len(at) == 2
    assert at[1] < ops.index("Complete") < ops.index("Tanh") < ops.index("Exp")


def streams_in(folder: Path, rank: int = 0) -> dict[str, int]:
    """The streams of a rank's collectives."""
    graph = onnx.load(
        folder / "model.par" / f"rank_{rank:04d}.onnx", load_external_data=False
    ).graph
    nodes = [n for n in graph.node if "AllReduce" in n.op_type]
    return {n.op_type: next((a.i for a in n.attribute if a.name == "stream"), 0) for n in nodes}


@pytest.mark.parametrize("transport", ["shared-memory", "gloo"])
def test_groups_that_differ_run_in_streams_of_their_own(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum over tp is needed at once, beside one over dp that is under way."""
    monkeypatch.setenv("ONNXPAR_TRANSPORT", transport)
    model = write_text(HEAD + ACROSS, tmp_path / "m.onnx")
    strategy = {"tensors": {"x": [None, "dp"], "u": [None, "tp"]}}
    check_agrees(model, tmp_path, options(4, strategy, "on", "dp=2,tp=2"))
    assert ops_in(tmp_path) == [
        *("MatMul", "StartAllReduce", "MatMul", "AllReduce", "Tanh", "Gate", "Exp"),
        *("After", "Complete", "Max"),
    ]
    for rank in range(4):
        assert streams_in(tmp_path, rank) == {"StartAllReduce": 1, "AllReduce": 0}
    assert json.loads((tmp_path / "model.par" / "plan.json").read_text())["streams"] == 2


def test_one_group_needs_one_stream(tmp_path: Path) -> None:
    split(CROSSED, tmp_path)
    assert set(streams_in(tmp_path).values()) == {0}
    assert json.loads((tmp_path / "model.par" / "plan.json").read_text())["streams"] == 1


def test_a_reader_in_a_body(tmp_path: Path) -> None:
    assert "Complete" not in split(IN_A_BODY, tmp_path)


def test_open_sizes(tmp_path: Path) -> None:
    """The same collectives are started at all sizes, and gathers find theirs in a run."""
    text = BRANCHES.replace("[5,", "[N,")
    model = write_text(HEAD + text, tmp_path / "m.onnx")
    layouts = {"x": [None, "tp"], "b": ["tp", None], "e": ["tp", None], "z": [None, None]}
    sharder.shard(model, tmp_path / "model.par", options(2, {"tensors": layouts}, "on"))
    assert "Complete" in ops_in(tmp_path)
    draw = np.random.default_rng(0)
    for rows in (5, 1, 4):
        feeds = {"x": draw.standard_normal((rows, 6), np.float32)}
        feeds["b"] = draw.standard_normal((rows, 4), np.float32)
        check_outputs(run_ranks(tmp_path / "model.par", feeds), run_unsplit(model, feeds), ["z"])


def test_a_way_that_there_is_not(tmp_path: Path) -> None:
    model = write_text(HEAD + CHAIN, tmp_path / "m.onnx")
    with pytest.raises(StrategyError, match="--overlap 'always': give one of auto, on, off"):
        sharder.plan(model, options(2, {}, "always"))


def test_idle_is_what_a_network_takes_longer_than_a_host() -> None:
    levels = [
        {"name": "host", "size": 2, "latency": "50 us", "bandwidth": "2 GB/s"},
        {"name": "network", "latency": "1 ms", "bandwidth": "100 MB/s"},
    ]
    costs = Costs(Topology.of({"levels": levels}), Mesh.parse("dp=2,tp=2"))
    assert costs.idle("AllReduce", [(0, 1), (2, 3)], 1e9) == 0.0
    over_network = costs.idle("AllReduce", [(0, 2), (1, 3)], 1e9)
    assert over_network == pytest.approx(2 * 950e-6 + 1e9 / 100e6 - 1e9 / 2e9)
    # The ranks of a host send half of their sum each, while cores move the other bytes.
    over_both = costs.idle("AllReduce", [(0, 1), (0, 1, 2, 3)], 1e9)
    assert over_both == pytest.approx(2 * 950e-6 + 0.5e9 / 100e6 - 1e9 / 2e9)
    fast = [levels[0], {"name": "network", "latency": "20 us", "bandwidth": "10 GB/s"}]
    costs = Costs(Topology.of({"levels": fast}), Mesh.parse("dp=2,tp=2"))
    assert costs.idle("AllReduce", [(0, 2), (1, 3)], 1e9) == 0.0
