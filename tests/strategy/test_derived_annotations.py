"""What a strategy asks of a node binds the nodes of its gradient, and copies of the node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training.steps import check_training, write_step

from onnxpar.compiler.plan import Plan
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.strategy.derived_annotations import sources_of
from onnxpar.strategy.strategy import Strategy

HEAD = """m (float[16,12] x, float[12,16] w1, float[64,16] w2) => (float[16,64] y)
{ h = MatMul(x, w1)  r = Relu(h)  e = LpNormalization<axis = 1>(r)
  n = LpNormalization<axis = 1>(w2)  t = Transpose(n)  y = MatMul(e, t) }"""
BACKBONE = {"x": ["dp", None], "labels": ["dp"]}
WEIGHT = 64 * 16 * 4
"""Bytes of the classifier."""


def strategy_of(shard: dict[str, Any]) -> Strategy:
    return Strategy.of({"mesh": {"dp": 4}, "shard": shard, "tensors": BACKBONE})


def plan_of(step: Path, shard: dict[str, Any], **how: Any) -> Plan:
    return sharder.plan(step, Options(strategy=strategy_of(shard), check_layouts=True, **how))[0]


def moved(plan: Plan) -> int:
    """Bytes that a rank sends of what belongs to the backward pass of the classifier."""
    return sum(c.bytes for c in plan.collectives if "MatMul_y.grad" in c.tensor)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return write_step(HEAD, tmp_path)


ASKED = {
    "by axis": {"MatMul_y": [[None, None], [None, "dp"]]},
    "by parts": {"MatMul_y": [[1, 1], [1, 4]]},
    "by factor": {"MatMul_y": {"m": None, "k": None, "n": "dp"}},
}


@pytest.mark.parametrize("form", ASKED)
def test_a_head_split_by_class_keeps_its_gradient_there(form: str, step: Path) -> None:
    """No rank sends a gradient of the whole classifier; the gradient of what it reads is summed."""
    plan = plan_of(step, ASKED[form])
    assert max(c.bytes for c in plan.collectives) < 3 * WEIGHT / 4  # no rank sends all of it
    assert moved(plan) == 3 * 16 * 16 * 4 / 4  # a reduce-scatter of the features' gradient


def test_an_entry_of_the_gradient_itself_counts_more(step: Path) -> None:
    own = {"MatMul_y.grad/MatMul.4": [[None, None], ["dp", None]]}  # a part of the batch
    plans = [plan_of(step, shard) for shard in (ASKED["by axis"], ASKED["by axis"] | own)]
    name = "MatMul_y.grad/MatMul.4"
    summed = [c.kind for c in plans[1].collectives if name in c.tensor.split()]
    assert summed == ["ReduceScatter"]
    assert moved(plans[1]) > moved(plans[0])


@pytest.mark.matrix
@pytest.mark.parametrize("how", [{}, {"accumulate": 2}, {"recompute": True}, {"optimizer": "adam"}])
def test_ranks_train_as_one_does(how: dict[str, Any], tmp_path: Path) -> None:
    how = {"optimizer": "sgd"} | how
    step = write_step(HEAD, tmp_path, **how)
    name = "accumulate/MatMul_y" if "accumulate" in how else "MatMul_y"
    shard = {name: [[1, 1], [1, 4]]}
    tensors = {} if "accumulate" in how else BACKBONE
    plan = check_training(step, "dp=4", 4, strategy={"shard": shard, "tensors": tensors})
    assert max(c.bytes for c in plan.collectives) < 3 * WEIGHT / 4  # no rank sends all of it


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("mm.grad/MatMul.2", ["mm"]),
        ("accumulate/mm.grad/MatMul.2", ["accumulate/mm"]),
        ("recompute/block.3/mm", ["mm"]),
        ("accumulate/recompute/block.3/mm", ["accumulate/mm"]),
        ("evaluation/mm", ["mm", "accumulate/mm"]),
        ("evaluate/mm", ["mm", "accumulate/mm"]),
        ("evaluate/evaluation/mm", ["mm", "accumulate/mm"]),
        ("mm", []),
        ("accumulate/mm", []),
        ("update/w/Mul.1", []),
    ],
)
def test_names_tell_what_a_node_is_derived_from(name: str, sources: list[str]) -> None:
    assert list(sources_of(name)) == sources
