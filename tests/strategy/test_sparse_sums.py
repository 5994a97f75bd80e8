"""Gradients of tables under data parallelism: few rows are gathered, many are all-reduced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training.steps import ThreadTrainer, batches, check_training, plan_of, shard, write_step

from onnxpar.compiler.plan import Plan
from onnxpar.report.compare_training import compare_training

ONE = """lookup (int64[BATCH,2] ids, float[WORDS,6] w, float[6,4] w2) => (float[BATCH,4] y)
{ rows = Gather(w, ids)  axis = Constant<value_ints=[1]>()  s = ReduceSum<keepdims=0>(rows, axis)
  y = MatMul(s, w2) }"""
TWO = """lookups (int64[BATCH,2] ids, int64[BATCH,3] more, float[WORDS,6] w, float[6,4] w2)
=> (float[BATCH,4] y)
{ a = Gather(w, ids)  b = Gather(w, more)  rows = Concat<axis=1>(a, b)
  axis = Constant<value_ints=[1]>()  s = ReduceSum<keepdims=0>(rows, axis)  y = MatMul(s, w2) }"""
TIED = """tied (int64[BATCH,2] ids, float[WORDS,6] w) => (float[BATCH,WORDS] y)
{ rows = Gather(w, ids)  axis = Constant<value_ints=[1]>()
  s = ReduceSum<keepdims=0>(rows, axis)  t = Transpose(w)  y = MatMul(s, t) }"""
SMALL = 8
"""Bytes of a loss."""


def step(text: str, folder: Path, words: int, batch: int = 8, optimizer: str = "sgd") -> Path:
    text = text.replace("WORDS", str(words)).replace("BATCH", str(batch))
    return write_step(text, folder, "mse", optimizer)


def exchanged(plan: Plan) -> dict[str, list[int]]:
    """The bytes of the collectives of each kind, without those of losses."""
    found: dict[str, list[int]] = {}
    for each in plan.collectives:
        if each.bytes > SMALL:
            found.setdefault(each.kind, []).append(each.bytes)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_few_rows_are_gathered(ranks: int, tmp_path: Path) -> None:
    plan = plan_of(step(ONE, tmp_path, 20_000), f"data-parallel {ranks}")
    share = (ranks - 1) / ranks
    assert exchanged(plan) == {
        "AllGather": [16 * 6 * 4 * share],
        "AllReduce": [2 * 6 * 4 * 4 * share],
    }


@pytest.mark.parametrize("words", [9, 1000])
def test_small_tables_are_reduced_with_the_others(words: int, tmp_path: Path) -> None:
    """A collective of its own would take longer than these bytes."""
    plan = plan_of(step(ONE, tmp_path, words), "data-parallel 4")
    assert exchanged(plan) == {"AllReduce": [2 * (words + 4) * 6 * 4 * 3 // 4]}


def test_many_rows_are_reduced(tmp_path: Path) -> None:
    plan = plan_of(step(ONE, tmp_path, 20_000, 64_000), "data-parallel 4")
    assert exchanged(plan) == {"AllReduce": [2 * (20_000 + 4) * 6 * 4 * 3 // 4]}


def test_rows_of_two_lookups(tmp_path: Path) -> None:
    plan = plan_of(step(TWO, tmp_path, 20_000), "data-parallel 4")
    assert sum(exchanged(plan)["AllGather"]) <= (16 + 24) * 6 * 4 * 3 // 4
    assert max(exchanged(plan)["AllReduce"]) == 2 * 6 * 4 * 4 * 3 // 4


def test_a_table_that_a_product_reads_too_is_reduced_once(tmp_path: Path) -> None:
    plan = plan_of(step(TIED, tmp_path, 20_000), "data-parallel 4")
    assert exchanged(plan) == {"AllReduce": [2 * 20_000 * 6 * 4 * 3 // 4]}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adagrad"])
@pytest.mark.parametrize("text", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("layout", ["data-parallel 2", "data-parallel 3", "zero1 4", "dp=2,tp=2"])
def test_training(layout: str, text: str, optimizer: str, tmp_path: Path) -> None:
    """Over a batch of 5, so that parts differ; its ids repeat."""
    made = step(text, tmp_path, 10_000, 5, optimizer)
    par, plan = shard(made, layout)
    feeds = [
        {name: array % 7 if array.dtype == np.int64 else array for name, array in batch.items()}
        for batch in batches(plan, 4)
    ]
    with ThreadTrainer(par) as trainer:
        report = compare_training(made, trainer, feeds, 0.05)
    assert report.ok, report.text()


def test_training_of_a_tied_table(tmp_path: Path) -> None:
    check_training(step(TIED, tmp_path, 10_000, 5), "data-parallel 3", 4)
