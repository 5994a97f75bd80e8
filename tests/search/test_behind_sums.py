"""Nodes behind sums over ranks are split where the cost model says that it pays, and compute what
the unsplit model computes, whatever the number of tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agreement import TIMEOUT, check_outputs, feeds_for, options, run_unsplit
from committed import MODELS, dims_of
from small_models import HEAD, write_text

from onnxpar.api import make_plan, shard
from onnxpar.compiler.plan import Plan
from onnxpar.cost.topology import Topology
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.threads import ThreadSession

BYTES_COUNT = Topology.of({"levels": [{"name": "host", "latency": "1 ns", "bandwidth": "1 GB/s"}]})
"""A second round of messages costs nothing, so what ranks need not compute decides."""
ROUNDS_COUNT = Topology.of({"levels": [{"name": "net", "latency": "1 ms", "bandwidth": "1 TB/s"}]})
"""A second round costs more than what ranks compute twice."""
BLOCK = """block (float[7,16] x, float[16,32] w1, float[32,16] w2, float[16] w3, float[16] w4,
    float[16] w5, float[16,32] w6, float[32,16] w7) => (float[7,16] y)
{
    h = MatMul(x, w1)  r = Relu(h)  s = MatMul(r, w2)  b = Add(s, w3)
    n = LayerNormalization(b, w4, w5)
    g = MatMul(n, w6)  t = Tanh(g)  d = MatMul(t, w7)  y = Add(d, n)
}"""


def plan_of(folder: Path, topology: Topology, **more: Any) -> Plan:
    """The plan of BLOCK over 2 ranks, which compute what the unsplit model does."""
    path = write_text(HEAD + BLOCK, folder / "block.onnx")
    how = replace(options("tensor-parallel 2", **more), topology=topology)
    plan = sharder.shard(path, folder / "m.par", how)
    feeds = feeds_for(plan)
    with ThreadSession(folder / "m.par", timeout=TIMEOUT) as session:
        check_outputs(session.run(None, feeds), run_unsplit(path, feeds), ["y"])
    return plan


def kinds(plan: Plan) -> Counter[str]:
    return Counter(collective.kind for collective in plan.collectives)


def test_rows_behind_a_sum_are_split_where_bytes_count(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, BYTES_COUNT)
    assert [(c.kind, c.tensor) for c in plan.collectives][:2] == [
        ("ReduceScatter", "s"),
        ("AllGather", "n"),
    ]
    row = 16 * 4
    assert [c.bytes for c in plan.collectives][:2] == [7 * row // 2] * 2, "of 7 rows, each half"


def test_sums_stay_where_rounds_count(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ROUNDS_COUNT)
    assert kinds(plan) == {"AllReduce": 2}


def test_requested_layouts_stay(tmp_path: Path) -> None:
    whole = {"tensors": {"s": [1, 1]}}
    plan = plan_of(tmp_path, BYTES_COUNT, strategy=whole)
    assert [c.kind for c in plan.collectives][:1] == ["AllReduce"]


def test_a_plan_is_the_same_from_its_saved_strategy(tmp_path: Path) -> None:
    path = write_text(HEAD + BLOCK, tmp_path / "block.onnx")
    saved = tmp_path / "saved.yaml"
    given = {"devices": 2, "topology": BYTES_COUNT}
    first = shard(path, tmp_path / "m.par", preset="tensor-parallel", save_strategy=saved, **given)
    again = make_plan(path, strategy=saved, **given)
    assert again.collectives == first.collectives
    assert kinds(first)["ReduceScatter"]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "model", ["bert.dynamo.dynamic", "gpt2.legacy.dynamic", "llama.dynamo.dynamic"]
)
def test_any_number_of_tokens(model: str, ranks: int, tmp_path: Path) -> None:
    check_open(model, ranks, tmp_path, [{"batch": 1, "seq": 7}, {"batch": 5, "seq": 4}])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_decoding_one_token(ranks: int, tmp_path: Path) -> None:
    sizes = [{"batch": 1, "past": 9}, {"batch": 3, "past": 2}]
    check_open("llama_decode.dynamo.dynamic", ranks, tmp_path, sizes)


def check_open(model: str, ranks: int, folder: Path, sizes: list[dict[str, int]]) -> None:
    """One folder for all sizes; something is split behind sums."""
    path = MODELS / f"{model}.onnx"
    how = replace(options(f"tensor-parallel {ranks}"), topology=BYTES_COUNT)
    plan = sharder.shard(path, folder / "m.par", how)
    assert kinds(plan)["ReduceScatter"] + kinds(plan)["AllToAll"]
    with ThreadSession(folder / "m.par", timeout=TIMEOUT) as session:
        for given in sizes:
            dims = dims_of(path.name, {**given, "target": 3})
            bound, _ = sharder.plan(path, Options(devices=1, preset="tensor-parallel", dims=dims))
            feeds = feeds_for(bound)
            names = [port.name for port in plan.outputs]
            check_outputs(session.run(None, feeds), run_unsplit(path, feeds), names)
