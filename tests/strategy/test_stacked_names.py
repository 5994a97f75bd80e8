"""Strategies name the weights that the loader stacked as the model file does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit

from onnxpar.base.errors import StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.planner import sharder

MODEL = Path(__file__).parents[2] / "models" / "experts" / "mixtral.loop.dynamo.onnx"
LAYER = "network.model.layers.0.block_sparse_moe.experts"
BLOCK = "/network/model/layers.0/block_sparse_moe/ScatterND_3_output_0/experts"
STACK = f"{BLOCK}/weight.0.1"


def plan_of(strategy: dict[str, Any]) -> Plan:
    return sharder.plan(MODEL, options("tp=2", strategy=strategy))[0]


def layout_of(strategy: dict[str, Any]) -> str:
    return next(w.layout_text for w in plan_of(strategy).weights if w.name == STACK)


def each(*items: Any) -> dict[str, Any]:
    return {f"{LAYER}.{i}.w1.weight": list(items) for i in range(4)}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "tensors",
    [
        {f"{LAYER}.*.w1.weight": ["tp", None]},
        {"*.w1.weight": [2, 1]},
        each("tp", None),
        {f"{LAYER}.*.w1.weight": [None, "tp"], **each("tp", None)},
        {STACK: [None, "tp", None]},
        {f"{BLOCK}/*.0.1": [None, "tp", None]},
    ],
)
def test_a_stack_is_split_like_its_weights(tensors: dict[str, Any]) -> None:
    assert layout_of({"tensors": tensors}) == "[-, tp, -]"


@pytest.mark.slow
def test_ranks_agree_with_the_unsplit_model(tmp_path: Path) -> None:
    strategy = {"tensors": {"*.experts.*.w2.weight": [None, "tp"]}}
    plan = sharder.shard(MODEL, tmp_path / "model.par", options("tp=2", strategy=strategy))
    ids = np.arange(48).reshape(4, 12)
    feeds = {port.name: ids if port.name == "input_ids" else ids * 0 + 1 for port in plan.inputs}
    got = run_ranks(tmp_path / "model.par", feeds)
    check_outputs(got, run_unsplit(MODEL, feeds), [port.name for port in plan.outputs])


@pytest.mark.slow
def test_a_plan_lists_the_weights_of_a_stack() -> None:
    weights = {w.name: w.stacks for w in plan_of({}).weights}
    assert weights[STACK] == tuple(each())
    assert not any(stacks for name, stacks in weights.items() if "/experts/weight" not in name)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "strategy",
    [
        {"tensors": {f"{LAYER}.2.w1.weight": ["tp", None]}},
        {"tensors": {**each("tp", None), f"{LAYER}.2.w1.weight": [None, "tp"]}},
        {"tensors": {f"{LAYER}.[012].w1.weight": ["tp", None]}},
        {"shard": {f"{LAYER}.2.w1.weight": {"d1": "tp"}}},
    ],
)
def test_some_weights_of_a_stack_are_an_error(strategy: dict[str, Any]) -> None:
    with pytest.raises(StrategyError) as error:
        plan_of(strategy)
    assert f"stacked as {STACK!r}" in str(error.value)
    assert f"write '{LAYER}.*.w1.weight'" in str(error.value)


@pytest.mark.slow
def test_weights_of_a_node() -> None:
    split = {"shard": {f"{LAYER}.*.w1.weight": {"d1": "tp"}}}
    assert layout_of(split) == "[-, tp, -]"


@pytest.mark.matrix
@pytest.mark.parametrize("entry", ["tp", ["tp"], ["tp", None, None, None]])
def test_an_entry_of_another_rank_is_an_error(entry: Any) -> None:
    with pytest.raises(StrategyError, match="has 3 dimensions"):
        plan_of({"tensors": {f"{LAYER}.*.w1.weight": entry}})
