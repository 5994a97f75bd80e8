"""Updates of parameters, by optimizer and group, against PyTorch's and over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.steps import DOUBLE, MLP, Array, check_training, run_unsplit, write_step

CASES = json.loads(Path(__file__).with_name("updates.json").read_text())
"""Written by updates_in_torch.py."""
STEPS = 5
RATE = 0.01
OVER_RANKS = {
    "groups": ("zero2 2", "tensor-parallel 2"),
}


def feeds(dtype: str) -> list[dict[str, Array]]:
    draw = np.random.default_rng(11)
    shapes = {"x": (8, 6), "target": (8, 5)}
    return [
        {n: draw.standard_normal(s).astype(dtype) for n, s in shapes.items()} for _ in range(STEPS)
    ]


def write(folder: Path, text: str = DOUBLE, **how: Any) -> Path:
    return write_step(text, folder, "mse", **how)


@pytest.mark.parametrize("case", CASES)
def test_five_steps_of_torch(case: str, tmp_path: Path) -> None:
    told, _ = run_unsplit(write(tmp_path, **CASES[case]["how"]), feeds("float64"), [RATE] * STEPS)
    for name, expected in CASES[case]["after"].items():
        np.testing.assert_allclose(
            told[-1][f"{name}.next"], expected, rtol=1e-9, atol=1e-10, err_msg=name
        )


@pytest.mark.matrix(6)
@pytest.mark.parametrize("case", CASES)
def test_five_steps_of_torch_in_float32(case: str, tmp_path: Path) -> None:
    path = write(tmp_path, MLP, **CASES[case]["how"])
    told, _ = run_unsplit(path, feeds("float32"), [RATE] * STEPS)
    for name, expected in CASES[case]["after"].items():
        np.testing.assert_allclose(
            told[-1][f"{name}.next"], expected, rtol=1e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize(
    ("case", "layout"), [(case, layout) for case, each in OVER_RANKS.items() for layout in each]
)
def test_ranks_take_the_same_steps(case: str, layout: str, tmp_path: Path) -> None:
    check_training(write(tmp_path, **CASES[case]["how"]), layout, STEPS, RATE)
