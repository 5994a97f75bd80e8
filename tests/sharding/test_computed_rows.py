"""Costs count the rows that a router chooses, not all rows that the graph has for experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from agreement import options

from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import load
from onnxpar.planner import sharder
from onnxpar.planner.context import PassContext
from onnxpar.search.op_cost import op_cost
from onnxpar.search.op_strategies import OpStrategy
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.flops import flops, flops_of_ranks
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.state import ShardingState

MODELS = Path(__file__).parents[2] / "models"
LOOP = "experts/mixtral.loop.legacy.onnx"
TOKENS, WIDTH, COLUMNS, EXPERTS, CHOSEN = 48, 16, 24, 4, 2
PRODUCT = 2 * TOKENS * CHOSEN * WIDTH * COLUMNS
"""FLOPs of one of the three products of the experts that tokens have."""


def context(layout: str, name: str = LOOP) -> PassContext:
    return sharder.plan(MODELS / name, options(layout))[1]


def products(ctx: PassContext) -> list[OpFactors]:
    ops = ctx.sharding.factors.ops
    return [op for op in ops if op.node.op == "MatMul" and "/experts/" in op.node.name]


def test_products_are_of_the_chosen_rows() -> None:
    ctx = context("1")
    assert [flops(op) for op in products(ctx)] == [PRODUCT] * 3
    assert [flops(replace(op, chosen=None)) for op in products(ctx)] == [2 * PRODUCT] * 3


def test_each_expert_that_has_a_row_transposes_its_matrix() -> None:
    ops = context("1", "mixtral.legacy.static.onnx").sharding.factors.ops
    turned = [op for op in ops if op.node.attrs.get("perm") == [0, 2, 1]]
    of_experts = [op for op in turned if "experts" in op.node.name]
    assert of_experts and all(op.chosen and op.chosen.share == 1 / EXPERTS for op in of_experts)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("expert-parallel 2", [2, 2]),
        ("expert-parallel 3", [2, 1, 1]),
        ("tensor-parallel 2", [2, 2]),
        ("data-parallel 4", [1, 1, 1, 1]),
    ],
)
def test_ranks_compute_the_chosen_rows_of_their_experts(layout: str, parts: list[int]) -> None:
    ctx = context(layout)
    for op in products(ctx):
        counts = flops_of_ranks(op, ctx.sharding, range(len(parts)))
        assert counts == [PRODUCT * part // EXPERTS for part in parts]


def test_ranks_without_an_expert_make_all_compute_every_row() -> None:
    ctx = context("expert-parallel 5")
    for op in products(ctx):
        assert max(flops_of_ranks(op, ctx.sharding, range(5))) == 2 * PRODUCT // EXPERTS


@pytest.mark.parametrize("ranks", [1, 2])
def test_time_is_of_the_chosen_rows(ranks: int) -> None:
    factors = analyse(load(MODELS / LOOP).graph)
    mesh = Mesh.of([("ep", ranks)])
    sharding = ShardingState.open(mesh, factors)
    mixture = [op for op in factors.ops if op.chosen is not None]
    assert len(mixture) >= 9
    for op in mixture:
        assert op.chosen is not None
        axes = tuple(
            (mesh.axis("ep"),) if leaf.atom == op.chosen.atom and ranks > 1 else ()
            for leaf in op.leaves
        )
        seconds, _ = op_cost(op, OpStrategy(axes), sharding)
        every, _ = op_cost(replace(op, chosen=None), OpStrategy(axes), sharding)
        assert seconds < every


def test_activations_are_of_the_chosen_rows() -> None:
    ctx = context("expert-parallel 2")
    factors = ctx.sharding.factors
    dense = GraphFactors(factors.tensors, [replace(op, chosen=None) for op in factors.ops])
    results = [op.result for op in products(ctx)]
    for name in results:
        assert factors.share(name, ctx.layouts[name]) == CHOSEN / EXPERTS
        assert dense.share(name, ctx.layouts[name]) == 1.0
        whole = [()] * len(factors.tensors[name].leaves)
        assert factors.share_over(name, whole) == CHOSEN / EXPERTS
        split = [(Mesh.of([("ep", 5)]).axis("ep"),), *whole[1:]]
        assert factors.share_over(name, split) == 1.0


def test_a_plan_says_what_it_assumes() -> None:
    plan, _ = sharder.plan(MODELS / LOOP, options("expert-parallel 2"))
    assert any(note.startswith("each row of a mixture has 2 of 4 experts ") for note in plan.notes)
    other, _ = sharder.plan(MODELS / "gpt2.legacy.static.onnx", options("data-parallel 2"))
    assert not any("experts" in note for note in other.notes)
