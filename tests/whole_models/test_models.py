"""Every committed model, split by the search and by every preset that applies, computes what the
whole one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from agreement import check_agrees, options
from committed import DYNAMIC, MODELS, ODD, STATIC, dims_of

LAYOUTS = [
    "tensor-parallel 2",
    "tensor-parallel 3",
    "tensor-parallel 4",
    "tensor-parallel 8",
    "2",
    "4",
    "data-parallel 3",
    "data-parallel 5",
    "hybrid dp=2,tp=2",
    "hybrid dp=2,tp=3",
    "hybrid dp=2,tp=4",
]
"""Of a number alone the search decides. The exports have a batch of 4, so that 3 ranks hold 2, 1
and 1 of it, and one of 5 ranks holds nothing."""


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", STATIC)
def test_static(model: str, layout: str, tmp_path: Path) -> None:
    check_agrees(MODELS / model, tmp_path, options(layout))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "batch"),
    [("tensor-parallel 3", 5), ("hybrid dp=2,tp=2", 5), ("hybrid dp=3,tp=2", 2)],
)
@pytest.mark.parametrize("model", DYNAMIC)
def test_dynamic_at_given_sizes(model: str, layout: str, batch: int, tmp_path: Path) -> None:
    dims = dims_of(model, {**ODD, "batch": batch})
    plan = check_agrees(MODELS / model, tmp_path, options(layout, dims=dims))
    assert plan.inputs[0].shape is not None
    assert plan.inputs[0].shape[0] == batch


@pytest.mark.slow
def test_vocabulary_of_50257_over_4(tmp_path: Path) -> None:
    model = MODELS / "gpt2_vocab50257.dynamo.static.onnx"
    plan = check_agrees(model, tmp_path, options("tensor-parallel 4"))
    logits = plan.outputs[0].layout
    assert logits is not None
    assert [logits.local_shape(plan.mesh, r)[-1] for r in range(4)] == [12565, 12564, 12564, 12564]
    embedding = max(plan.weights, key=lambda w: w.bytes)
    assert embedding.shape == (50257, 16) and embedding.bytes_per_rank == 12565 * 16 * 4


@pytest.mark.slow
def test_heads_9_and_3_over_2_and_3(tmp_path: Path) -> None:
    model = MODELS / "llama_heads9.dynamo.static.onnx"
    for ranks in (2, 3):
        plan = check_agrees(model, tmp_path, options(f"tensor-parallel {ranks}"))
        assert [c.kind for c in plan.collectives] == ["AllReduce"] * 5
