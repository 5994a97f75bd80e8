"""Linear attention and causal convolutions are trained through their function bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from opsets import since
from training.steps import batches, check_training, run_unsplit
from whole_models.test_newest_opset import gated_delta_net

from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.training import grad

Array = npt.NDArray[Any]
RATE = 0.01


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training step of the mixer, without its states."""
    folder = tmp_path_factory.mktemp("mixer")
    model = gated_delta_net()
    kept = [port for port in model.graph.output if port.name == "y"]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.save(model, folder / "m.onnx")
    grad(folder / "m.onnx", folder / "step.onnx", loss="mse", optimizer="sgd")
    return folder / "step.onnx"


def loss_by_formula(weights: dict[str, Array], x: Array, targets: Array) -> float:
    """The loss in float64, by the formulas of ONNX's documentation of the two ops."""
    heads, width = 4, 6
    batch, steps, _ = x.shape

    def sigmoid(values: Array) -> Array:
        return np.asarray(1 / (1 + np.exp(-values)))

    def split(values: Array) -> Array:
        return values.reshape(batch, steps, heads, width)

    q, k = (split(x @ weights[f"w{n}"]) for n in "qk")
    v = x @ weights["wv"]
    padded = np.concatenate([np.zeros((batch, 3, v.shape[2])), v], 1)
    kernel = weights["conv"][:, 0, :].T
    convolved = sum(padded[:, i : i + steps] * kernel[i] for i in range(4))
    v = split(np.asarray(convolved * sigmoid(np.asarray(convolved))))
    decay, beta = np.exp(-np.abs(x @ weights["wg"])), sigmoid(x @ weights["wb"])
    state = np.zeros((batch, heads, width, width))
    outputs = []
    for t in range(steps):
        state = state * decay[:, t, :, None, None]
        found = np.einsum("bhde,bhd->bhe", state, k[:, t])
        change = beta[:, t, :, None] * (v[:, t] - found)
        state = state + np.einsum("bhd,bhe->bhde", k[:, t], change)
        outputs.append(np.einsum("bhde,bhd->bhe", state, q[:, t]) / np.sqrt(width))
    y = np.stack(outputs, 1).reshape(batch, steps, -1) @ weights["wo"]
    return float(np.mean((y - targets) ** 2))


@since(27)
def test_gradients_are_those_of_the_formulas(step: Path) -> None:
    """An SGD step moves weights by their gradients; compared with central differences."""
    plan, _ = sharder.plan(step, Options(devices=1, preset="data-parallel"))
    feeds = next(iter(batches(plan, 1)))
    (outputs,), found = run_unsplit(step, [feeds], [RATE])
    model = onnx.load(step)
    before = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    slots = {slot.input: slot.output for slot in found.parameters}
    weights = {name: before[name].astype(np.float64) for name in slots}
    x = feeds["x"].astype(np.float64)
    (targets,) = (value for name, value in feeds.items() if name != "x")
    rng = np.random.default_rng(2)
    assert set(weights) == {"wq", "wk", "wv", "wg", "wb", "conv", "wo"}
    for name, result in slots.items():
        gradient = (before[name] - outputs[result]) / RATE
        direction = rng.standard_normal(weights[name].shape)
        ends = [
            loss_by_formula({**weights, name: weights[name] + s * direction}, x, targets)
            for s in (1e-5, -1e-5)
        ]
        assert float(np.sum(gradient * direction)) == pytest.approx(
            (ends[0] - ends[1]) / 2e-5, rel=2e-3, abs=1e-4
        ), name


@pytest.mark.slow
@pytest.mark.matrix
@since(27)
@pytest.mark.parametrize("layout", ["data-parallel 2", "tensor-parallel 2", "zero3 2"])
def test_ranks_train_to_the_same(step: Path, layout: str) -> None:
    check_training(step, layout, 3)
