"""Experts compute the rows of their tokens alone in both passes of a training step, which then is
that of the dense graph."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from training.expert_steps import mixture
from training.steps import check_training, plan_of, shard, write_step

STEPS = 4


def parts(par: Path) -> list[list[int]]:
    """For each rank, the numbers of experts for which its nodes split rows."""
    found = []
    for path in sorted(par.glob("rank_????.onnx")):
        nodes = onnx.load(path, load_external_data=False).graph.node
        found.append([len(n.output) for n in nodes if n.op_type == "Split" and "::pairs" in n.name])
    return found


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    [
        "data-parallel 1",
        "data-parallel 3",
        "expert-parallel 2",
        "expert-parallel 3",
        "expert-parallel 4",
        "expert-parallel dp=2,ep=2",
        "expert-parallel ep=2,tp=2",
        "tensor-parallel 2",
        "zero3 2",
        "2",
        "4",
    ],
)
def test_steps_are_those_of_the_dense_graph(layout: str, tmp_path: Path) -> None:
    step = write_step(mixture(5, 7), tmp_path, "mse", "adamw")
    check_training(step, layout, STEPS)
    compacted = parts(shard(step, layout)[0])
    assert all(compacted)


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("layout", ["data-parallel 1", "data-parallel 2", "expert-parallel 4"])
def test_few_tokens(rows: int, layout: str, tmp_path: Path) -> None:
    """Most experts, and some ranks, have none."""
    step = write_step(mixture(6, rows), tmp_path, "mse")
    check_training(step, layout, STEPS)
    assert all(parts(shard(step, layout)[0]))


def test_ranks_have_different_numbers_of_experts(tmp_path: Path) -> None:
    """Five over three ranks: all ranks have nodes for two; the last one's second has no rows."""
    step = write_step(mixture(5, 8), tmp_path, "mse")
    check_training(step, "expert-parallel 3", STEPS)
    assert {n for each in parts(shard(step, "expert-parallel 3")[0]) for n in each} == {2}


def test_fewer_experts_than_ranks(tmp_path: Path) -> None:
    """A rank without experts computes all rows of none."""
    step = write_step(mixture(2, 6), tmp_path, "mse")
    check_training(step, "expert-parallel 3", STEPS)
    assert not any(parts(shard(step, "expert-parallel 3")[0]))


def test_rows_that_were_not_chosen_may_be_read(tmp_path: Path) -> None:
    """Experts' values for all tokens are added to the result: nothing is left out."""
    read = mixture(4, 6).replace("  y =", "  all = ReduceSum <keepdims = 0> (b, first)\n  sum =")
    read = read.removesuffix("}") + "  y = Add (sum, all)\n}"
    step = write_step(read, tmp_path, "mse")
    check_training(step, "data-parallel 2", STEPS)


def test_costs_are_those_of_the_chosen_rows(tmp_path: Path) -> None:
    """Each token has two of eight experts."""
    step = write_step(mixture(8, 16), tmp_path, "mse")
    plan = plan_of(step, "data-parallel 1")
    router = 2 * (2 * 16 * 4 * 8)
    forward, backward = 4 * 6 + 6 * 3, 4 * 6 + 2 * 6 * 3
    assert plan.flops["model"] == router + 2 * 16 * 2 * (forward + backward)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_in_another_type(precision: str, tmp_path: Path) -> None:
    step = write_step(mixture(4, 8), tmp_path, "mse", precision=precision)
    check_training(step, "expert-parallel 2", STEPS)
    assert all(parts(shard(step, "expert-parallel 2")[0]))


def test_recomputed_rows(tmp_path: Path) -> None:
    """The forward pass is computed again from the same pairs."""
    step = write_step(mixture(4, 8), tmp_path, "mse", recompute=True)
    check_training(step, "expert-parallel 3", STEPS)
    assert all(parts(shard(step, "expert-parallel 3")[0]))
