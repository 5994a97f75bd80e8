"""What plans say about strategies that were not chosen is true, by trying them all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from search.test_meshes import ONE, TWO, matmuls

import onnxpar
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner.context import load_model
from onnxpar.planner.options import Options
from onnxpar.report.proof_text import proof_text
from onnxpar.search.objective import Objective, OverLimit
from onnxpar.search.search import EXHAUSTIVE, solve
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.state import ShardingState

MESHES = ("tp=4", "dp=2,tp=2")
"""All meshes of 4 ranks."""


def optimum(path: Path, topology: Topology, memory: float | None) -> float:
    """Seconds of the best strategy on any mesh of 4 ranks, by trying every one."""
    model = load_model(path, Options(devices=4))
    factors = analyse(model.graph)
    best = math.inf
    for mesh in MESHES:
        state = ShardingState.open(Mesh.parse(mesh), factors, topology)
        goal = Objective(memory=memory)
        try:
            found = solve(model.graph, state, model.states, how=EXHAUSTIVE, objective=goal)
        except OverLimit:
            continue
        best = min(best, found.seconds)
    return best


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("machine", [ONE, TWO], ids=["one host", "two hosts"])
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_no_strategy_is_below_the_bound(rows: int, machine: Any, tmp_path: Path) -> None:
    path, topology = matmuls(tmp_path, rows), Topology.of(machine)
    plan = onnxpar.plan(path, devices=4, topology=topology)
    fastest = sum(plan.memory.values())
    checked = []
    for share in (None, 0.9, 0.7):
        limit = {} if share is None else {"memory_limit": f"{int(share * fastest)}B"}
        try:
            proof = onnxpar.plan(path, devices=4, topology=topology, **limit).proof
        except onnxpar.base.errors.StrategyError:
            continue
        assert proof is not None
        assert (proof.axes, proof.is_complete) == (2, True)
        assert (proof.memory is None) == (share is None)
        least = optimum(path, topology, proof.memory)
        assert proof.bound <= least * (1 + 1e-9)
        assert least <= proof.seconds * (1 + 1e-9)
        checked.append(share)
    assert rows < 64 or checked == [None, 0.9, 0.7]


def test_a_gap_that_is_left(tmp_path: Path) -> None:
    """Prices on memory prove less than there is, if no mixture of strategies is a strategy."""
    path, topology = matmuls(tmp_path, 64), Topology.of(ONE)
    needs = sum(onnxpar.plan(path, devices=4, topology=topology).memory.values())
    limit = f"{int(0.9 * needs)}B"
    plan = onnxpar.plan(path, devices=4, topology=topology, memory_limit=limit)
    assert plan.proof is not None
    assert plan.proof.bound < 0.999 * plan.proof.seconds
    assert f"takes less than {plan.proof.bound * 1e3:.3f} ms" in " ".join(str(plan).split())


def test_it_is_saved(tmp_path: Path) -> None:
    path = matmuls(tmp_path, 4)
    made = onnxpar.shard(path, tmp_path / "m.par", devices=4, topology=Topology.of(ONE))
    saved = json.loads((tmp_path / "m.par" / "plan.json").read_text())
    assert made.proof is not None
    assert saved["proof"] == made.proof.to_json()
    given = onnxpar.plan(path, mesh="dp=2,tp=2", topology=Topology.of(ONE))
    assert given.proof is not None and given.proof.axes is None
    assert onnxpar.plan(path, mesh="tp=4", preset="tensor-parallel").to_json()["proof"] is None


def test_strategies_left_out_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer strategies of a node than there are, the bound is said to be for those alone."""
    monkeypatch.setattr("onnxpar.search.problem.MOST_STRATEGIES", 2)
    monkeypatch.setattr("onnxpar.search.problem.FEWEST_STRATEGIES", 2)
    plan = onnxpar.plan(matmuls(tmp_path, 4), devices=4, topology=Topology.of(ONE))
    assert plan.proof is not None and not plan.proof.is_complete
    assert "strategy that it compared on" in proof_text(plan.proof.to_json())


def test_words() -> None:
    proof = {"seconds": 2e-3, "bound": 1.5e-3, "axes": 2, "memory": None, "complete": True}
    others, count = (
        "strategy on a mesh of one or two axes",
        "2.000 ms of compute and communication by its own count",
    )
    slower = (
        f"at most 33.33% slower than the fastest {others}: {count}; none takes less than 1.500 ms"
    )
    assert proof_text(proof) == slower
    assert proof_text({**proof, "bound": 2e-3}) == f"no {others} is faster: {count}"
    faster = f"faster than every {others}: {count}; those take at least 2.200 ms"
    assert proof_text({**proof, "bound": 2.2e-3}) == faster
    assert proof_text({**proof, "bound": 0.0}).endswith("proved nothing about other strategies")
    within = proof_text({**proof, "bound": 2e-3, "axes": None, "memory": 4e6})
    assert within.startswith("no strategy on this mesh within 4 MB a rank is faster")
