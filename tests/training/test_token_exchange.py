"""In a training step, ranks exchange the chosen rows of both passes; steps are those of the dense
graph on one rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from lowering.mixtures import SLOW
from training.expert_steps import behind_layer, changed, mixture
from training.steps import CROSS_ENTROPY, check_training, write_step

from onnxpar.compiler.plan import Plan
from onnxpar.training import grad

MODELS = Path(__file__).parents[2] / "models" / "experts"
STEPS = 4


def check(
    folder: Path, layout: str, text: str, tensors: int, optimizer: str = "adamw", **how: Any
) -> Plan:
    """Trains on slow links; asserts that ranks exchange rows of `tensors` tensors, and gather
    none."""
    step = write_step(text, folder, "mse", optimizer, **how)
    plan = check_training(step, layout, STEPS, topology=SLOW)
    kinds = Counter(c.kind for c in plan.collectives)
    assert kinds["AllToAllV"] == tensors and kinds["AllToAll"] == 1
    assert not kinds["AllGather"] and not kinds["ReduceScatter"]
    return plan


@pytest.mark.matrix(6)
@pytest.mark.parametrize("rows", [12, 31])
@pytest.mark.parametrize(
    "layout",
    [
        "expert-parallel 2",
        "expert-parallel 3",
        "expert-parallel 4",
        "expert-parallel 5",
        "expert-parallel dp=2,ep=4",
        "expert-parallel dp=3,ep=3",
    ],
)
def test_both_passes(layout: str, rows: int, tmp_path: Path) -> None:
    """Tokens there and results back; the gradients of results there."""
    check(tmp_path, layout, mixture(5, rows), 3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["expert-parallel 3", "expert-parallel ep=2,tp=2"])
def test_gradients_of_tokens_travel_back(layout: str, tmp_path: Path) -> None:
    check(tmp_path, layout, behind_layer(mixture(5, 24)), 4)


@pytest.mark.slow
def test_partial_sums_are_added_up_for_chosen_rows(tmp_path: Path) -> None:
    """Beside split columns, gradients of tokens are partial sums. Ranks need the totals, and add up
    the chosen rows before they travel: of 3 experts, 2 of 5 rows."""
    text = changed(
        behind_layer(mixture(5, 24)),
        ("h = MatMul (a, w_up)", "scaled_a = Mul (a, weight)\n  h = MatMul (scaled_a, w_up)"),
    )
    plan = check(tmp_path, "expert-parallel ep=2,tp=2", text, 4)
    (total,) = (c for c in plan.collectives if c.kind == "AllReduce" and "MatMul_h" in c.tensor)
    assert total.operand == round(3 * 24 * 4 * 4 * 2 / 5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 5])
def test_few_tokens(rows: int, tmp_path: Path) -> None:
    """Some ranks have no token, or receive none."""
    check(tmp_path, "expert-parallel 4", mixture(6, rows, width=64), 3, optimizer="sgd")


def test_all_tokens_choose_experts_of_one_rank(tmp_path: Path) -> None:
    crowded = changed(
        mixture(5, 12),
        ("int64[1] two", "float[5] much = {99, 98, 0, 0, 0}, int64[1] two"),
        ("scores = MatMul (x, w_gate)", "raw = MatMul (x, w_gate)\n  scores = Add (raw, much)"),
    )
    check(tmp_path, "expert-parallel 3", crowded, 3)


@pytest.mark.slow
def test_many_experts_of_a_rank(tmp_path: Path) -> None:
    """Rows of more than 32 experts are one tensor."""
    check(tmp_path, "expert-parallel 2", mixture(70, 96), 3)


@pytest.mark.slow
def test_weights_on_tokens_and_activation_behind_experts(tmp_path: Path) -> None:
    text = changed(
        mixture(5, 24),
        ("h = MatMul (a, w_up)", "scaled_a = Mul (a, weight)\n  h = MatMul (scaled_a, w_up)"),
        ("d = Where (chosen, m, zero)", "t = Tanh (m)\n  d = Where (chosen, t, zero)"),
    )
    check(tmp_path, "expert-parallel 2", text, 4)


@pytest.mark.slow
def test_experts_that_read_weights_of_rows_gather_all_rows(tmp_path: Path) -> None:
    """The router's weight is at the tokens: a product before it and one behind would take rows
    there and back twice."""
    text = changed(
        mixture(5, 24), ("b = MatMul (g, w_down)", "s = Mul (g, weight)\n  b = MatMul (s, w_down)")
    )
    step = write_step(text, tmp_path, "mse", "adamw")
    plan = check_training(step, "expert-parallel 2", STEPS, topology=SLOW)
    assert not any(c.kind == "AllToAllV" for c in plan.collectives)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_rows_travel_in_half_precision(precision: str, tmp_path: Path) -> None:
    """Rows are cast before they leave the ranks of the tokens."""
    how = {"precision": precision}
    plan = check(tmp_path, "expert-parallel 2", behind_layer(mixture(4, 24)), 4, **how)
    there = next(c for c in plan.collectives if c.kind == "AllToAllV")
    assert there.operand == 12 * 2 * 4 * 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["expert-parallel 2", "expert-parallel dp=2,ep=4"])
def test_recomputed_rows(layout: str, tmp_path: Path) -> None:
    """The forward pass is computed again, from the same pairs: tokens and results travel twice."""
    check(tmp_path, layout, behind_layer(mixture(5, 24)), 6, recompute=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gpt_oss.batched_mm.legacy",
        "mixtral.loop.legacy",
        "qwen3_moe.batched_mm.dynamo",
        "qwen3_moe.eager.legacy",
        "qwen3_moe.grouped_mm.hf",
    ],
)
@pytest.mark.parametrize("layout", ["expert-parallel 4", "expert-parallel ep=2,tp=2"])
def test_exported_models(name: str, layout: str, tmp_path: Path) -> None:
    step = tmp_path / "step.onnx"
    model = MODELS / f"{name}.onnx"
    inputs = onnx.load(model, load_external_data=False).graph.input
    opened = {size.dim_param for port in inputs for size in port.type.tensor_type.shape.dim}
    grad(model, step, loss=CROSS_ENTROPY, optimizer="sgd", dims=dict.fromkeys(opened - {""}, 8))
    plan = check_training(step, layout, 2, topology=SLOW)
    assert sum(c.kind == "AllToAllV" for c in plan.collectives) == 4
