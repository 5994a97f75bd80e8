"""Optimizers as nodes, against PyTorch's formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from training.steps import LINEAR, Array, run_unsplit, write_step

from onnxpar.base.errors import StrategyError
from onnxpar.training import grad
from onnxpar.training.adam_optimizers import AdamW
from onnxpar.training.optimizers import make_optimizer

STEPS = 5
RATES = [0.1, 0.05, 0.2, 0.1, 0.01]
TEXT = LINEAR.replace("float[", "double[")
Advance = Callable[[Array, Array, dict[str, Array], float, int], Array]


def decayed(p: Array, g: Array, decay: float) -> Array:
    return g + decay * p


def sgd(decay: float = 0.0) -> Advance:
    return lambda p, g, state, rate, t: p - rate * decayed(p, g, decay)


def momentum(decay: float = 0.0, mu: float = 0.9, nesterov: bool = False) -> Advance:
    def advance(p: Array, g: Array, state: dict[str, Array], rate: float, t: int) -> Array:
        g = decayed(p, g, decay)
        state["b"] = g if t == 1 else mu * state["b"] + g
        return p - rate * (g + mu * state["b"] if nesterov else state["b"])

    return advance


def adam_direction(
    g: Array, state: dict[str, Array], t: int, beta1: float, beta2: float, epsilon: float
) -> Array:
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    root = np.sqrt(state["v"]) / np.sqrt(1 - beta2**t)
    return np.asarray(state["m"] / (1 - beta1**t) / (root + epsilon))


def adam(
    decay: float = 0.0, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
) -> Advance:
    def advance(p: Array, g: Array, state: dict[str, Array], rate: float, t: int) -> Array:
        g = decayed(p, g, decay)
        return p - rate * adam_direction(g, state, t, beta1, beta2, epsilon)

    return advance


def adamw(decay: float = 0.01) -> Advance:
    def advance(p: Array, g: Array, state: dict[str, Array], rate: float, t: int) -> Array:
        return p * (1 - rate * decay) - rate * adam_direction(g, state, t, 0.9, 0.999, 1e-8)

    return advance


def lamb(decay: float = 0.01) -> Advance:
    def advance(p: Array, g: Array, state: dict[str, Array], rate: float, t: int) -> Array:
        along = adam_direction(g, state, t, 0.9, 0.999, 1e-6) + decay * p
        return p - rate * np.linalg.norm(p) / np.linalg.norm(along) * along

    return advance


def adagrad(decay: float = 0.0, epsilon: float = 1e-10) -> Advance:
    def advance(p: Array, g: Array, state: dict[str, Array], rate: float, t: int) -> Array:
        g = decayed(p, g, decay)
        state["s"] = state.get("s", 0) + g * g
        return p - rate * g / (np.sqrt(state["s"]) + epsilon)

    return advance


CASES: dict[str, tuple[str, dict[str, Any], Advance]] = {
    "sgd": ("sgd", {}, sgd()),
    "sgd with decay": ("sgd", {"weight_decay": 0.1}, sgd(0.1)),
    "momentum": ("momentum", {}, momentum()),
    "momentum with decay": (
        "momentum",
        {"weight_decay": 0.1, "momentum": 0.5},
        momentum(0.1, 0.5),
    ),
    "nesterov": ("momentum", {"nesterov": True}, momentum(nesterov=True)),
    "adam": ("adam", {}, adam()),
    "adam with all": (
        "adam",
        {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 0.01},
        adam(0.1, 0.8, 0.9, 0.01),
    ),
    "adamw": ("adamw", {}, adamw()),
    "adamw with decay": ("adamw", {"weight_decay": 0.3}, adamw(0.3)),
    "lamb": ("lamb", {}, lamb()),
    "lamb with decay": ("lamb", {"weight_decay": 0.3}, lamb(0.3)),
    "adagrad": ("adagrad", {}, adagrad()),
    "adagrad with decay": ("adagrad", {"weight_decay": 0.1, "epsilon": 0.1}, adagrad(0.1, 0.1)),
}


def feeds() -> list[dict[str, Array]]:
    draw = np.random.default_rng(5)
    return [
        {"x": draw.standard_normal((4, 3)), "target": draw.standard_normal((4, 2))}
        for _ in range(STEPS)
    ]


def gradient(w: Array, batch: dict[str, Array]) -> Array:
    """Of the mean of (x w - target)^2."""
    x, target = batch["x"], batch["target"]
    return np.asarray(2 / target.size * x.T @ (x @ w - target))


def weight(folder: Path) -> Array:
    return numpy_helper.to_array(onnx.load(folder / "model.onnx").graph.initializer[0])


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_five_steps(case: str, tmp_path: Path) -> None:
    """With a learning rate of its own for each."""
    name, options, advance = CASES[case]
    told, step = run_unsplit(write_step(TEXT, tmp_path, "mse", name, **options), feeds(), RATES)
    assert [s.kind for s in step.parameters] == ["parameter"]
    w, state = weight(tmp_path), {}
    for t, (batch, rate, got) in enumerate(zip(feeds(), RATES, told, strict=True), 1):
        loss = np.mean((batch["x"] @ w - batch["target"]) ** 2)
        np.testing.assert_allclose(got["loss"], loss, rtol=1e-12)
        w = advance(w, gradient(w, batch), state, rate, t)
        np.testing.assert_allclose(got["w.next"], w, rtol=1e-10, err_msg=f"step {t}")


TORCH: dict[str, tuple[dict[str, Any], list[float]]] = {
    "sgd": (
        {"weight_decay": 0.1},
        [0.816983785, -1.39530307, 2.4156759, -0.319276618, -1.0449424, 0.910667941],
    ),
    "momentum": (
        {"weight_decay": 0.1, "momentum": 0.5, "nesterov": True},
        [0.709325353, -0.982571098, 2.08710596, -0.657323137, -0.984164188, 0.55712188],
    ),
    "adam": (
        {"weight_decay": 0.1},
        [0.710500739, -1.70059951, 2.70190547, 0.201091996, -1.18787811, 1.70105131],
    ),
    "adamw": (
        {"weight_decay": 0.3},
        [0.635967008, -1.53527438, 2.45066124, 0.166848695, -1.11481861, 1.5360614],
    ),
    "adagrad": (
        {"weight_decay": 0.1},
        [0.800703536, -1.77569657, 2.78085972, 0.278259243, -1.09500809, 1.77805528],
    ),
}
"""What torch.optim's classes make of w in three steps of mse at a learning rate of 0.1."""


@pytest.mark.parametrize("name", TORCH)
def test_three_steps_of_torch(name: str, tmp_path: Path) -> None:
    options, expected = TORCH[name]
    text = """linear (double[4,3] x) => (double[4,2] y)
    <double[3,2] v = {1, -2, 3, 0.5, -1, 2}> { y = MatMul(x, v) }"""
    batch = {
        "x": np.array([[1, 2, 3], [-1, 0.5, 2], [0, 1, -1], [2, -1, 1]]),
        "target": np.array([[1.0, 0], [0, 1], [2, -1], [-1, 1]]),
    }
    told, _ = run_unsplit(
        write_step(text, tmp_path, "mse", name, **options), [batch] * 3, [0.1] * 3
    )
    np.testing.assert_allclose(told[-1]["v.next"].reshape(-1), expected, rtol=1e-8)


@pytest.mark.parametrize("most", [0.5, 1e3])
def test_clip_norm(most: float, tmp_path: Path) -> None:
    """As torch.nn.utils.clip_grad_norm_: of all gradients together, which a small norm leaves."""
    text = """two (double[4,3] x, double[3,2] w1, double[2] w2) => (double[4,2] y)
    { y = Gemm(x, w1, w2) }"""
    path = write_step(text, tmp_path, "mse", "sgd", clip_norm=most)
    told, step = run_unsplit(path, feeds(), [1.0] * STEPS)
    stored = onnx.load(tmp_path / "model.onnx").graph.initializer
    w1, w2 = (numpy_helper.to_array(t) for t in stored)
    assert step.metrics == ["gradient_norm"]
    for batch, got in zip(feeds(), told, strict=True):
        error = batch["x"] @ w1 + w2 - batch["target"]
        g1, g2 = batch["x"].T @ error / 4, error.sum(0) / 4
        norm = np.sqrt((g1**2).sum() + (g2**2).sum())
        np.testing.assert_allclose(got["gradient_norm"], norm, rtol=1e-12)
        factor = min(most / (norm + 1e-6), 1)
        w1, w2 = w1 - factor * g1, w2 - factor * g2
        np.testing.assert_allclose(got["w1.next"], w1, rtol=1e-10)
        np.testing.assert_allclose(got["w2.next"], w2, rtol=1e-10)


def test_a_step_counts_in_float64(tmp_path: Path) -> None:
    """1 - 0.999^t of the first steps, of which float32 would lose half of the digits."""
    path = write_step(LINEAR, tmp_path, "mse", "adam")
    first = {n: a.astype(np.float32) for n, a in feeds()[0].items()}
    told, _ = run_unsplit(path, [first] * 2, [0.1] * 2)
    w, state = weight(tmp_path).astype(np.float64), {}
    for t in (1, 2):
        wide = {n: a.astype(np.float64) for n, a in first.items()}
        w = adam()(w, gradient(w, wide), state, 0.1, t)
        np.testing.assert_allclose(told[t - 1]["w.next"], w, rtol=2e-6)
    assert [int(got["step.next"]) for got in told] == [1, 2]


def test_no_optimizer_tells_gradients(tmp_path: Path) -> None:
    told, step = run_unsplit(write_step(TEXT, tmp_path, "mse", "none"), feeds()[:1], [0.0])
    assert {"loss", "w.grad"} == told[0].keys() - {*step.evaluation} and step.slots == []
    expected = gradient(weight(tmp_path), feeds()[0])
    np.testing.assert_allclose(told[0]["w.grad"], expected, rtol=1e-12)


def test_an_optimizer_may_be_given_as_an_object(tmp_path: Path) -> None:
    told, _ = run_unsplit(write_step(TEXT, tmp_path, "mse", AdamW(0.3)), feeds(), RATES)
    named, _ = run_unsplit(
        write_step(TEXT, tmp_path, "mse", "adamw", weight_decay=0.3), feeds(), RATES
    )
    np.testing.assert_array_equal(told[-1]["w.next"], named[-1]["w.next"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamz", {}, "--optimizer 'adamz': give one of sgd, momentum, adam"),
        (
            "sgd",
            {"momentum": 0.9},
            "optimizer sgd has no hyperparameter 'momentum'; its hyperparameters: weight_decay",
        ),
        ("none", {"weight_decay": 0.1}, "no hyperparameter 'weight_decay'; .*: none"),
        ("adam", {"beta1": 1.0}, "adam: beta1 is 1.0; it"),
        ("adam", {"beta2": -0.1}, "adam: beta2 is -0.1; it"),
        ("adam", {"epsilon": -1e-8}, "adam: epsilon is -1e-08; it"),
        ("sgd", {"weight_decay": -1.0}, "sgd: weight_decay is -1.0; it"),
        ("momentum", {"momentum": float("nan")}, "momentum: momentum is nan; it"),
        ("rmsprop", {"alpha": 1.0}, "rmsprop: alpha is 1.0; it must be from 0 to below 1"),
        ("adafactor", {"beta2_decay": 0.1}, "beta2_decay is 0.1; it must be 0 or less"),
        ("adafactor", {"clip_threshold": 0.5}, "clip_threshold is 0.5; it must be 1 or more"),
        ("lamb", {"amsgrad": True}, "optimizer lamb has no hyperparameter 'amsgrad'"),
        ("momentum", {"momentum": 0.0, "nesterov": True}, "nesterov needs a momentum"),
    ],
)
def test_bad_hyperparameters(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        make_optimizer(name, **options)


@pytest.mark.parametrize("most", [0.0, -1.0, float("nan")])
def test_bad_clip_norm(most: float, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=f"--clip-norm {most}: must be above 0"):
        write_step(LINEAR, tmp_path, "mse", clip_norm=most)


def test_hyperparameters_beside_an_optimizer_are_refused(tmp_path: Path) -> None:
    """They would be ignored, as would an argument whose name is wrong."""
    with pytest.raises(StrategyError, match=r"weight_decay: .* give them to AdamW\(\.\.\.\)"):
        grad(
            tmp_path / "m.onnx",
            tmp_path / "s.onnx",
            loss="mse",
            optimizer=AdamW(),
            weight_decay=0.1,
        )
