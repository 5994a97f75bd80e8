"""Updates of parameters, by optimizer and group, against PyTorch's and over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from training.steps import (
    DOUBLE,
    MLP,
    Array,
    check_training,
    quiet,
    run_unsplit,
    write_step,
)

CASES = json.loads(Path(__file__).with_name("updates.json").read_text())
"""Written by updates_in_torch.py."""
STEPS = 5
RATE = 0.01
OVER_RANKS = {
    "adam with amsgrad": ("zero2 2",),
    "rmsprop with all": ("data-parallel 2",),
    "nadam": ("zero2 3",),
    "adafactor": ("zero2 2", "tensor-parallel 2", "zero3 3"),
    "muon": ("zero2 2", "tensor-parallel 2", "zero3 3"),
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


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("case", "layout"), [(case, layout) for case, each in OVER_RANKS.items() for layout in each]
)
def test_ranks_take_the_same_steps(case: str, layout: str, tmp_path: Path) -> None:
    check_training(write(tmp_path, **CASES[case]["how"]), layout, STEPS, RATE)


MORE = {
    "lion": {"optimizer": "lion", "weight_decay": 0.1},
    "lars": {"optimizer": "lars", "weight_decay": 0.1, "trust_coefficient": 0.02},
}


def lion(p: Array, g: Array, state: dict[str, Array], decay: float) -> Array:
    """Algorithm 2 of the paper."""
    mean = state.get("mean", np.zeros_like(p))
    state["mean"] = 0.99 * mean + 0.01 * g
    return np.asarray(p - RATE * (np.sign(0.9 * mean + 0.1 * g) + decay * p))


def lars(p: Array, g: Array, state: dict[str, Array], decay: float) -> Array:
    """Algorithm 1 of the paper."""
    local = 0.02 * np.linalg.norm(p) / (np.linalg.norm(g) + decay * np.linalg.norm(p))
    state["v"] = 0.9 * state.get("v", np.zeros_like(p)) + RATE * local * (g + decay * p)
    return np.asarray(p - state["v"])


@pytest.mark.parametrize(("name", "advance"), [("lion", lion), ("lars", lars)])
def test_optimizers_of_papers(name: str, advance: Any, tmp_path: Path) -> None:
    told, _ = run_unsplit(write(tmp_path, **MORE[name]), feeds("float64"), [RATE] * STEPS)
    plain = write(tmp_path, optimizer="none")
    session = ort.InferenceSession(str(plain), quiet())
    stored = onnx.load(tmp_path / "model.onnx").graph.initializer
    p = {t.name: numpy_helper.to_array(t) for t in stored}
    states: dict[str, dict[str, Array]] = {n: {} for n in p}
    for batch in feeds("float64"):
        grads = session.run([f"{n}.grad" for n in p], batch | p)
        for n, g in zip(p, grads, strict=True):
            decay = 0.1 if p[n].ndim == 2 else 0.0
            p[n] = advance(p[n], np.asarray(g), states[n], decay)
    for n, expected in p.items():
        np.testing.assert_allclose(told[-1][f"{n}.next"], expected, rtol=1e-9, err_msg=n)


@pytest.mark.parametrize(("name", "layout"), [("lion", "zero2 2"), ("lars", "tensor-parallel 2")])
def test_ranks_follow_papers(name: str, layout: str, tmp_path: Path) -> None:
    check_training(write(tmp_path, **MORE[name]), layout, STEPS, RATE)
