"""Ranks exchange the rows that a router chose, and no others; results equal the unsplit model's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit
from lowering.mixtures import exchanging, feeds_of, mixture
from onnx import helper, numpy_helper

from onnxpar.compiler.plan import Plan
from onnxpar.graph.typical import Typical
from onnxpar.planner import sharder

MODELS = Path(__file__).parents[2] / "models" / "experts"
IDS = np.arange(48).reshape(4, 12)
EXCHANGED = {"AllToAll": 1, "AllToAllV": 2}


def kinds(plan: Plan) -> dict[str, int]:
    return dict(Counter(c.kind for c in plan.collectives))


def check_model(name: str, layout: str, folder: Path) -> Plan:
    path = MODELS / f"{name}.onnx"
    ports = [port.name for port in onnx.load(path).graph.input]
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    feeds = {port: feeds[port] for port in ports}
    plan = sharder.shard(path, folder / "model.par", exchanging(layout))
    got = run_ranks(folder / "model.par", feeds)
    check_outputs(got, run_unsplit(path, feeds), [port.name for port in plan.outputs])
    return plan


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name, layout",
    [
        ("mixtral.loop.legacy", "expert-parallel 2"),
        ("mixtral.loop.legacy", "expert-parallel 3"),
        ("mixtral.loop.legacy", "expert-parallel dp=2,ep=4"),
        ("mixtral.loop.legacy", "expert-parallel dp=2,ep=3"),
        ("gpt_oss.batched_mm.legacy", "expert-parallel 4"),
        ("qwen3_moe.eager.legacy", "expert-parallel 5"),
    ],
)
def test_exported_models(name: str, layout: str, tmp_path: Path) -> None:
    assert kinds(check_model(name, layout, tmp_path)) == EXCHANGED


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["expert-parallel 2", "expert-parallel dp=2,ep=2"])
def test_sorted_rows(layout: str, tmp_path: Path) -> None:
    """The export sorts rows by expert: they stay at their places, and only their experts' numbers
    are gathered."""
    plan = check_model("qwen3_moe.grouped_mm.hf", layout, tmp_path)
    assert kinds(plan) == EXCHANGED | {"AllGather": 3}
    gathered = [c for c in plan.collectives if c.kind == "AllGather"]
    assert all(c.operand <= 8 * 96 for c in gathered)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["expert-parallel ep=4,tp=2", "expert-parallel ep=2,tp=2"])
def test_beside_split_columns(layout: str, tmp_path: Path) -> None:
    """Partial sums over tp travel back, and the ranks of the tokens add them up."""
    plan = check_model("mixtral.loop.legacy", layout, tmp_path)
    assert kinds(plan) == EXCHANGED | {"AllReduce": 2}


def test_experts_read_rows_that_arrived(tmp_path: Path) -> None:
    check_model("mixtral.loop.legacy", "expert-parallel 4", tmp_path)
    graph = onnx.load(tmp_path / "model.par/rank_0001.onnx", load_external_data=False).graph
    finders = [n for n in graph.node if n.op_type == "Split" and n.name.endswith("::pairs/rows")]
    products = [n for n in graph.node if n.op_type == "MatMul" and "/experts/" in n.name]
    assert len(finders) == 1 and len(products) == 3
    assert all(n.name.endswith("@0") for n in products)


CHOICES: dict[str, Any] = {
    "balanced": [[0, 1], [2, 3], [4, 5], [1, 0], [3, 2], [5, 4]],
    "one expert": [[3, 3]] * 6,
    "one rank's experts": [[0, 1], [1, 0], [0, 0], [1, 1], [0, 1], [1, 0]],
    "the last ones": [[5, 4], [5, 5], [4, 5], [5, 4], [4, 4], [5, 4]],
    "no expert": [[6, 6]] * 6,
    "some have one": [[0, 6], [6, 6], [2, 5], [6, 3], [5, 5], [6, 1]],
}


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("case", CHOICES)
def test_what_a_router_may_choose(case: str, ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(mixture(6, 2, 6), path)
    feeds = feeds_of(CHOICES[case])
    plan = sharder.shard(path, tmp_path / "model.par", exchanging(f"expert-parallel {ranks}"))
    assert kinds(plan) == EXCHANGED
    check_outputs(run_ranks(tmp_path / "model.par", feeds), run_unsplit(path, feeds), ["y"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["expert-parallel 4", "expert-parallel dp=2,ep=4"])
def test_open_rows(layout: str, tmp_path: Path) -> None:
    """One row over all ranks, fewer than ranks, many."""
    path = tmp_path / "model.onnx"
    onnx.save(mixture(4, 3, "rows"), path)
    many = replace(exchanging(layout), typical=Typical.from_argument({"rows": 64}))
    plan = sharder.shard(path, tmp_path / "model.par", many)
    assert kinds(plan) == EXCHANGED
    random = np.random.default_rng(3)
    for rows in (1, 3, 4, 19):
        feeds = feeds_of(random.integers(0, 4, (rows, 3)))
        check_outputs(run_ranks(tmp_path / "model.par", feeds), run_unsplit(path, feeds), ["y"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral.loop.dynamo", "qwen3_moe.batched_mm.dynamo"])
def test_exported_models_with_open_sizes(name: str, tmp_path: Path) -> None:
    path = MODELS / f"{name}.onnx"
    plan = sharder.shard(path, tmp_path / "model.par", exchanging("expert-parallel 4"))
    assert kinds(plan) == EXCHANGED
    for rows, columns in ((1, 1), (1, 7), (3, 1), (4, 12)):
        ids = (IDS[:rows, :columns] + 7) % 48
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        feeds = {port.name: feeds[port.name] for port in plan.inputs}
        got = run_ranks(tmp_path / "model.par", feeds)
        check_outputs(got, run_unsplit(path, feeds), ["logits"])


def test_half_precision(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(mixture(4, 2, 6, "float16"), path)
    plan = sharder.shard(path, tmp_path / "model.par", exchanging("expert-parallel 2"))
    assert kinds(plan) == EXCHANGED
    feeds = feeds_of([[0, 1], [2, 3], [3, 3], [1, 2], [0, 2], [3, 0]], "float16")
    check_outputs(run_ranks(tmp_path / "model.par", feeds), run_unsplit(path, feeds), ["y"])


def test_quantized_experts(tmp_path: Path) -> None:
    """Ranks hold the integers of their own experts."""
    model, random = mixture(4, 2, 6), np.random.default_rng(5)
    for weight in [t for t in model.graph.initializer if t.name in ("w1", "w2")]:
        name, shape = weight.name, tuple(weight.dims)
        model.graph.initializer.remove(weight)
        parts = random.integers(-99, 99, shape, np.int8), np.full(4, 0.01, np.float32)
        names = [f"{name}.integers", f"{name}.scales"]
        model.graph.initializer.extend(map(numpy_helper.from_array, parts, names))
        model.graph.node.insert(0, helper.make_node("DequantizeLinear", names, [name], axis=0))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    plan = sharder.shard(path, tmp_path / "model.par", exchanging("expert-parallel 2"))
    assert kinds(plan) == EXCHANGED
    feeds = feeds_of([[0, 1], [2, 3], [3, 3], [1, 2], [0, 2], [3, 0]])
    check_outputs(run_ranks(tmp_path / "model.par", feeds), run_unsplit(path, feeds), ["y"])


def test_the_plan_has_the_bytes_of_a_balanced_router(tmp_path: Path) -> None:
    """Of 48 rows, each of 4 ranks holds 12, and sends 2 copies of each to experts, 3/4 of them on
    other ranks."""
    plan = check_model("mixtral.loop.legacy", "expert-parallel 4", tmp_path)
    numbers, there, back = plan.collectives
    assert numbers.bytes == 4 * 8 * 3 // 4
    assert there.bytes == back.bytes == 12 * 2 * 16 * 4 * 3 // 4


def test_bytes_and_latency_decide(tmp_path: Path) -> None:
    """Rows go to 2 of 8 ranks, which is cheaper where rows are many; where they are few, the
    sorting of rows is not worth it."""
    seen = {}
    for rows in (64, 65536):
        path = tmp_path / f"{rows}.onnx"
        onnx.save(mixture(8, 2, rows, width=64), path)
        plan, _ = sharder.plan(path, options("expert-parallel 8"))
        seen[rows] = kinds(plan)
    assert "AllGather" in seen[64] and not EXCHANGED.keys() & seen[64].keys()
    assert seen[65536] == EXCHANGED


def test_ranks_without_experts_gather_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(mixture(3, 2, 8), path)
    plan, _ = sharder.plan(path, exchanging("expert-parallel 4"))
    assert "AllToAllV" not in kinds(plan)
