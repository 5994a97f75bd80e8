"""Every bundle that onnxpar writes of a model is shown to compute it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agreement import options
from lowering.mixtures import SLOW
from training.expert_steps import mixture
from training.steps import MLP, write_step

import onnxpar
from onnxpar.planner import sharder
from onnxpar.training import grad

MODELS = Path(__file__).parents[2] / "models"
STATIC = sorted(path.name for path in MODELS.glob("*.static.onnx"))
OPEN = sorted(path.name for path in MODELS.glob("*.dynamic.onnx"))
EXPERTS = ("gpt_oss.batched_mm.legacy", "mixtral.loop.legacy", "qwen3_moe.eager.legacy")
LAYOUTS = (
    "data-parallel 2",
    "tensor-parallel 2",
    "tensor-parallel 3",
    "hybrid dp=2,tp=2",
    "sequence-parallel 2",
    "context-parallel 2",
    "2",
    "4",
)


def verify(model: Path, folder: Path, layout: str, **how: Any) -> onnxpar.Verification:
    """Shards a model and verifies the folder."""
    sharder.shard(model, folder / "model.par", options(layout, **how))
    return onnxpar.verify(model, folder / "model.par")


def check(model: Path, folder: Path, layout: str, **how: Any) -> onnxpar.Verification:
    """Asserts that ranks are shown to compute a model, and that every node is."""
    try:
        result = verify(model, folder, layout, **how)
    except onnxpar.StrategyError:
        pytest.skip("the preset does not fit the model")
    assert result.ok and sum(result.proved.values()) == result.nodes, result.text()
    return result


@pytest.mark.matrix(12)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STATIC)
def test_models(name: str, layout: str, tmp_path: Path) -> None:
    check(MODELS / name, tmp_path, layout)


def test_a_transformer_needs_no_samples(tmp_path: Path) -> None:
    result = check(MODELS / "llama.dynamo.static.onnx", tmp_path, "hybrid dp=2,tp=2")
    assert result.proved["arithmetic"] >= 40 and result.proved["lemma"] >= 90
    assert "sampled" not in result.proved and result.collectives == 5


@pytest.mark.matrix(12)
@pytest.mark.parametrize("layout", ["data-parallel 2", "tensor-parallel 2", "hybrid dp=2,tp=2"])
@pytest.mark.parametrize("name", OPEN)
def test_open_sizes(name: str, layout: str, tmp_path: Path) -> None:
    """At the sizes of the plan's example, which the statement names."""
    result = check(MODELS / name, tmp_path, layout)
    assert result.sizes and "not proved for others" in result.text()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["expert-parallel 2", "expert-parallel 4", "tensor-parallel 2"])
@pytest.mark.parametrize("name", EXPERTS)
def test_mixtures(name: str, layout: str, tmp_path: Path) -> None:
    check(MODELS / "experts" / f"{name}.onnx", tmp_path, layout)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("mesh", ["a=2,b=2", "a=5,b=1", "a=1,b=3"])
@pytest.mark.parametrize("name, port", [("resnet", "pixel_values"), ("unet", "sample")])
def test_images_split_along_space(name: str, port: str, mesh: str, tmp_path: Path) -> None:
    """Ranks exchange edges, and have other numbers of rows after each convolution."""
    model, par = MODELS / f"{name}.dynamo.static.onnx", tmp_path / "m.par"
    onnxpar.shard(model, par, mesh=mesh, strategy={"tensors": {port: [None, None, "a", "b"]}})
    result = onnxpar.verify(model, par)
    assert result.ok, result.text()


@pytest.mark.slow
def test_exchanged_tokens(tmp_path: Path) -> None:
    """Tokens travel to the ranks of their experts."""
    model = MODELS / "experts" / "mixtral.loop.legacy.onnx"
    check(model, tmp_path, "expert-parallel 4", topology=SLOW)


@pytest.mark.parametrize(
    "layout", ["data-parallel 2", "zero1 2", "zero3 3", "tensor-parallel 2", "hybrid dp=2,tp=2"]
)
def test_steps(layout: str, tmp_path: Path) -> None:
    """Buckets, shards of states, and the program of the evaluation."""
    step = write_step(MLP, tmp_path, optimizer="adamw")
    result = check(step, tmp_path, layout)
    assert "loss" in result.outputs


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data-parallel 2", "zero1 2", "zero3 2", "hybrid dp=2,tp=2"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_steps_of_transformers(name: str, layout: str, tmp_path: Path) -> None:
    step = tmp_path / "step.onnx"
    model = MODELS / f"{name}.legacy.training.onnx"
    grad(model, step, loss="softmax-cross-entropy", optimizer="adamw")
    check(step, tmp_path, layout)


@pytest.mark.slow
def test_a_step_with_recomputation(tmp_path: Path) -> None:
    step = write_step(mixture(4, 8), tmp_path, "mse", recompute=True)
    check(step, tmp_path, "data-parallel 2")
