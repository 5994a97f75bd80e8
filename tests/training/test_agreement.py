"""Ranks train to what one does: the losses of many steps, and in float64 all that they leave."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from committed import MODELS
from training.models import BLOCKS, CONV, HEAD, MOE
from training.steps import CROSS_ENTROPY, MLP, check_training, write_step

from onnxpar.report.compare import Comparison
from onnxpar.report.compare_training import CLOSE, _losses, _state
from onnxpar.training import grad

LAYOUTS = (
    "2",
    "dp=2,tp=2",
    "data-parallel 2",
    "data-parallel 3",
    "data-parallel 4",
    "tensor-parallel 2",
    "tensor-parallel 3",
    "tensor-parallel 4",
    "hybrid dp=2,tp=2",
    "zero1 2",
    "zero2 3",
    "zero3 2",
    "zero3 4",
    "zero2 dp=2,tp=2",
    "zero3 dp=2,tp=2",
)
DOUBLE = MLP.replace("float[", "double[")


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Steps of an MLP in float64, by optimizer."""
    how: dict[str, dict[str, Any]] = {
        "sgd": {"clip_norm": 0.5},
        "momentum": {"weight_decay": 0.1, "nesterov": True},
        "adam": {},
        "adamw": {"clip_norm": 1.0},
        "lamb": {},
        "adagrad": {"clip_norm": 0.5},
    }
    return {
        name: write_step(DOUBLE, tmp_path_factory.mktemp(name), optimizer=name, **given)
        for name, given in how.items()
    }


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_mlp_in_float64(layout: str, double: dict[str, Path]) -> None:
    """9 hidden units and 5 classes divide by none of 2 to 4 ranks; norms are of all ranks' parts
    together."""
    check_training(double["sgd"], layout, 50)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw", "lamb", "adagrad"])
@pytest.mark.parametrize("layout", ["zero1 4", "zero3 dp=2,tp=2"])
def test_other_optimizers_in_float64(layout: str, optimizer: str, double: dict[str, Path]) -> None:
    check_training(double[optimizer], layout, 12)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["data-parallel 2", "zero3 4", "hybrid dp=2,tp=2"])
def test_an_mlp_in_float32(layout: str, tmp_path: Path) -> None:
    check_training(write_step(MLP, tmp_path, optimizer="adam"), layout, 20, 0.01)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("data-parallel 4", {"batch_norm": "global"}),
        ("data-parallel 3", {"batch_norm": "global"}),
        ("data-parallel 4", {"batch_norm": "node", "groups": 2}),
        ("data-parallel 4", {"batch_norm": "local", "groups": 4}),
        ("data-parallel 2", {"batch_norm": "local", "groups": 4}),
        ("tensor-parallel 2", {"batch_norm": "global"}),
        ("zero3 2", {"batch_norm": "global"}),
        ("zero2 dp=2,tp=2", {"batch_norm": "node", "groups": 2}),
        ("data-parallel 3", {}),
    ],
)
def test_a_convolution_with_batch_norm(layout: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Running statistics are states as parameters are, and agree too."""
    check_training(write_step(CONV, tmp_path, optimizer="momentum", **how), layout, 10, 0.05)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["expert-parallel 2", "expert-parallel 4", "data-parallel 2"])
def test_experts(layout: str, tmp_path: Path) -> None:
    check_training(write_step(MOE, tmp_path, optimizer="sgd"), layout, 10, 0.01)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["sequence-parallel 2", "sequence-parallel 3", "zero3 4"])
def test_blocks(layout: str, tmp_path: Path) -> None:
    check_training(write_step(BLOCKS, tmp_path, optimizer="adam"), layout, 10, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_classes_that_are_split(axis: str, tmp_path: Path) -> None:
    classes = {"mesh": {axis: 4}, "shard": {"MatMul_y": [[None, None], [None, axis]]}}
    step = write_step(HEAD, tmp_path, optimizer="sgd")
    check_training(step, f"{axis}=4", 10, 1e-3, strategy=classes)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Steps of committed models."""
    folder = tmp_path_factory.mktemp("exported")
    for name in ("gpt2", "llama", "bert"):
        model = MODELS / f"{name}.dynamo.static.onnx"
        grad(model, folder / f"{name}.onnx", loss=CROSS_ENTROPY, optimizer="sgd", clip_norm=1.0)
    return {name: folder / f"{name}.onnx" for name in ("gpt2", "llama", "bert")}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt2", "data-parallel 4"),
        ("gpt2", "sequence-parallel 2"),
        ("gpt2", "zero3 dp=2,tp=2"),
        ("llama", "tensor-parallel 4"),
        ("llama", "zero2 2"),
        ("llama", "sequence-parallel 2"),
        ("bert", "hybrid dp=2,tp=2"),
        ("bert", "sequence-parallel 2"),
    ],
)
def test_exported_models(name: str, layout: str, exported: dict[str, Path]) -> None:
    check_training(exported[name], layout, 10)


def test_what_the_comparison_lets_pass() -> None:
    """A loss that is no number never agrees, wherever it stands."""
    nan = math.nan
    for losses in ([(1.0, 1.0), (nan, nan)], [(nan, 1.0)], [(1.0, 1.0), (1.0, nan), (1.0, 1.0)]):
        assert not _losses("loss", losses, "float32", 1e-5).ok
    assert _losses("loss", [(1.0, 1.0 + 1e-6)], "float32", 1e-5).ok
    assert not _losses("loss", [(1.0, 1.0), (1.0, 1.1)], "float32", 1e-5).ok
    good = np.ones(3)
    assert _state("w", good, good + 1e-10).ok and not _state("w", good, good + 1e-8).ok
    wide = _state("w", good.astype(np.float32), good.astype(np.float32) + 0.1)
    assert wide.ok and wide.error == pytest.approx(0.1 / 1.1, rel=1e-5)
    for odd in (nan, math.inf):
        assert not _state("w", good, np.array([1, odd, 1])).ok
    count = np.array(5)
    assert _state("step", count, count).ok and not _state("step", count, count + 1).ok
    assert CLOSE["float64"] == (1e-9, 1e-9)
    assert isinstance(wide, Comparison)
