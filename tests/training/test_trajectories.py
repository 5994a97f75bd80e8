"""Committed models become over ranks what they become as one, and in PyTorch; `matrix.py` tries all
presets and meshes, and more steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training.matrix import (
    ALLOWED,
    FEW,
    MODELS,
    UNSTEADY,
    compare,
    double_error,
    few_layouts,
    layouts,
)
from training.trajectories import (
    Trajectory,
    expected,
    gradient_error,
    loss_error,
    parameter_error,
    torch_error,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trajectories")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt2", "zero1 2"),
        ("llama", "sequence-parallel 2"),
        ("bert", "tensor-parallel 3"),
        ("vit", "zero3 2"),
        ("resnet", "data-parallel 2"),
        ("dlrm", "hybrid dp=2,tp=2"),
        ("moe", "expert-parallel 3"),
        ("lstm", "data-parallel 3"),
    ],
)
def test_float32(model: str, layout: str, folder: Path) -> None:
    row = compare(model, layout, 10, folder)
    assert not row.faults, row.line()


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt2", "tensor-parallel 3"),
        ("gpt2", "data-parallel 3"),
        ("llama", "zero3 dp=2,tp=2"),
        ("dlrm", "zero3 3"),
        ("dlrm", "tensor-parallel 4"),
    ],
)
def test_float64(model: str, layout: str, folder: Path) -> None:
    assert double_error(model, layout, 50, folder) <= ALLOWED["double"]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "rows", "layout"),
    [
        ("gpt2", 2, "zero1 3"),
        ("llama", 1, "sequence-parallel 2"),
        ("bert", 2, "hybrid dp=3,tp=2"),
        ("vit", 2, "zero3 3"),
        ("resnet", 2, "data-parallel 3"),
        ("dlrm", 2, "zero2 3"),
        ("moe", 2, "expert-parallel 3"),
        ("lstm", 2, "zero3 3"),
    ],
)
def test_fewer_rows_than_ranks(model: str, rows: int, layout: str, folder: Path) -> None:
    row = compare(model, layout, 10, folder, rows)
    assert not row.faults, row.line()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rows", "layout"), [("gpt2", 2, "data-parallel 3"), ("dlrm", 1, "zero3 4")]
)
def test_fewer_rows_in_float64(model: str, rows: int, layout: str, folder: Path) -> None:
    assert double_error(model, layout, 50, folder, rows) <= ALLOWED["double"]


def test_what_the_errors_are() -> None:
    """Each is seen, also one that is no number."""
    ones = np.ones(3)
    assert loss_error(ones + 1e-3, 2 * ones) == pytest.approx(0.5, rel=1e-2)
    small = {"a": np.array([4.0, 0]), "b": np.array([1e-4, 0])}
    moved = {"a": np.array([4.0, 1e-3]), "b": np.array([1e-4, 1e-5])}
    assert parameter_error(moved, small) == pytest.approx(0.1)
    assert gradient_error(moved, small) == pytest.approx(1e-5 / 4e-3)
    told = expected("dlrm")
    parameters = {name: np.full(10000, np.nan) for name in told.places}
    assert np.isnan(torch_error(Trajectory(told.losses, {}, parameters), told))
    for name, at in told.places.items():
        parameters[name][at] = told.values[name]
    given = Trajectory(told.losses, {}, parameters)
    assert torch_error(given, told) == 0
    assert torch_error(Trajectory(told.losses * 1.01, {}, parameters), told) > 0.009
    assert all(told.losses[-1] < 0.99 * told.losses[0] for told in map(expected, MODELS))


def test_the_presets_that_apply() -> None:
    assert list(layouts("moe", ["expert-parallel", "hybrid"], [2, 4])) == [
        "expert-parallel 2",
        "expert-parallel 4",
        "hybrid dp=2,tp=2",
    ]
    assert len({*layouts("gpt2", [], [2, 3, 4])}) == 6 * 3 + 3
    assert list(few_layouts("moe", 1, ["expert-parallel", "zero3"])) == [
        "zero3 4",
        "expert-parallel 2",
    ]
    assert all(any(few_layouts(m, n, [])) != ((m, n) in UNSTEADY) for m in MODELS for n in FEW)
