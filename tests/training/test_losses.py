"""Losses behind the output of a model, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from training.steps import CROSS_ENTROPY, Array, quiet, run_unsplit, write_model, write_step

from onnxpar.base.errors import ModelError, OnnxparError, StrategyError
from onnxpar.training import grad

DRAW = np.random.default_rng(2)


def scores(*shape: int) -> str:
    """A model of a bias alone, whose output has this shape."""
    sizes = ",".join(map(str, shape))
    return (
        f"scores (double[{sizes}] x, double[{sizes}] w) => (double[{sizes}] y) {{ y = Add(x, w) }}"
    )


def drawn(shape: tuple[int, ...]) -> Array:
    """The weight `w` of a small model."""
    return np.random.default_rng([*b"w"]).standard_normal(shape)


def told(path: Path, x: Array, **target: Array) -> tuple[float, Array, Array]:
    """The loss of a step, its gradient by `w`, and what the model made of x."""
    results, _ = run_unsplit(path, [{"x": x, **target}], [1.0])
    model = ort.InferenceSession(str(path.with_name("model.onnx")), quiet())
    y = np.asarray(model.run(None, {"x": x})[0])
    return float(results[0]["loss"]), np.asarray(results[0]["w.grad"]), y


def numeric(loss: Callable[[Array], float], y: Array) -> Array:
    """The gradient by central differences."""
    out = np.zeros_like(y)
    for at in np.ndindex(y.shape):
        step = np.zeros_like(y)
        step[at] = 1e-6
        out[at] = (loss(y + step) - loss(y - step)) / 2e-6
    return out


def log_softmax(y: Array, axis: int) -> Array:
    wide = y - y.max(axis, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis, keepdims=True)))


def picked(log_prob: Array, labels: Array, axis: int) -> float:
    """Minus the mean of what labels say, but for those of -100."""
    moved = np.moveaxis(log_prob, axis, -1).reshape(-1, log_prob.shape[axis])
    flat = labels.reshape(-1)
    kept = flat != -100
    return float(-moved[kept, flat[kept]].mean())


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [CROSS_ENTROPY, "nll"])
@pytest.mark.parametrize(
    ("shape", "given", "axis"),
    [
        ((4, 5), None, 1),
        ((2, 3, 5), None, 2),
        ((2, 5, 3, 2), None, 1),
        ((2, 3, 5), 1, 1),
        ((3, 2, 5), 0, 0),
        ((2, 5, 3, 4), -1, 3),
        ((2, 5, 3, 4), 2, 2),
    ],
)
def test_losses_by_class(
    kind: str, shape: tuple[int, ...], given: int | None, axis: int, tmp_path: Path
) -> None:
    """Classes are the last dimension, of four and more the second, or the one that is given."""
    path = write_step(scores(*shape), tmp_path, kind, "none", class_axis=given)
    x = DRAW.standard_normal(shape)
    rest = [s for a, s in enumerate(shape) if a != axis]
    labels = DRAW.integers(0, shape[axis], rest)
    loss, gradient, y = told(path, x, labels=labels)

    def expected(y: Array) -> float:
        return picked(log_softmax(y, axis) if kind == CROSS_ENTROPY else y, labels, axis)

    np.testing.assert_allclose(loss, expected(y), rtol=1e-12)
    np.testing.assert_allclose(gradient, numeric(expected, y), atol=1e-8)


@pytest.mark.parametrize("kind", [CROSS_ENTROPY, "nll"])
def test_ignored_labels_do_not_count(kind: str, tmp_path: Path) -> None:
    path = write_step(scores(2, 3, 4), tmp_path, kind, "none")
    labels = np.array([[1, -100, 3], [-100, 0, -100]])
    loss, gradient, y = told(path, DRAW.standard_normal((2, 3, 4)), labels=labels)

    def expected(y: Array) -> float:
        return picked(log_softmax(y, 2) if kind == CROSS_ENTROPY else y, labels, 2)

    np.testing.assert_allclose(loss, expected(y), rtol=1e-12)
    np.testing.assert_allclose(gradient, numeric(expected, y), atol=1e-8)
    assert not gradient[labels == -100].any()


def test_mean_square(tmp_path: Path) -> None:
    path = write_step(scores(3, 4), tmp_path, "mse", "none")
    target = DRAW.standard_normal((3, 4))
    loss, gradient, y = told(path, DRAW.standard_normal((3, 4)), target=target)
    np.testing.assert_allclose(loss, ((y - target) ** 2).mean(), rtol=1e-12)
    np.testing.assert_allclose(gradient, 2 * (y - target) / 12, rtol=1e-12)


@pytest.mark.parametrize("ends_in_sigmoid", [False, True])
def test_binary_cross_entropy(ends_in_sigmoid: bool, tmp_path: Path) -> None:
    """Of scores, or of those before a final Sigmoid; large ones overflow nowhere."""
    text = scores(3, 4)
    if ends_in_sigmoid:
        text = text.replace("y = Add(x, w)", "s = Add(x, w)  y = Sigmoid(s)")
    path = write_step(text, tmp_path, "bce", "none")
    target = DRAW.random((3, 4)).round(1)
    x = 3 * DRAW.standard_normal((3, 4))
    x[0, 0], x[0, 1] = 800, -800
    loss, gradient, _ = told(path, x, target=target)
    z = x + drawn((3, 4))
    np.testing.assert_allclose(loss, (np.logaddexp(0, z) - z * target).mean(), rtol=1e-12)
    p = 1 / (1 + np.exp(-np.clip(z, -700, 700)))
    np.testing.assert_allclose(gradient, (p - target) / 12, rtol=1e-9, atol=1e-12)


def sigmoid(h: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-h)))


def softmax(h: Array) -> Array:
    return np.exp(log_softmax(h, 1))


CLIP = "s = Sigmoid(h)  y = Clip(s, low, high)"
PROBABILITIES: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "identity": ("s = Sigmoid(h)  y = Identity(s)", sigmoid),
    "reshape": ("s = Sigmoid(h)  y = Reshape(s, flat)", lambda h: sigmoid(h).reshape(-1)),
    "transpose": ("s = Sigmoid(h)  y = Transpose(s)", lambda h: sigmoid(h).T),
    "slice": ("s = Sigmoid(h)  y = Slice(s, one, two)", lambda h: sigmoid(h)[1:2]),
    "chain": (
        "s = Sigmoid(h)  t = Transpose(s)  u = Reshape(t, flat)  y = Slice(u, one, two)",
        lambda h: sigmoid(h).T.reshape(-1)[1:2],
    ),
    "clip": (CLIP, lambda h: sigmoid(h).clip(0.1, 0.9)),
    "clip of scores": ("y = Clip(h, low, high)", lambda h: h.clip(0.1, 0.9)),
    "hard sigmoid": ("y = HardSigmoid<alpha = 0.05>(h)", lambda h: 0.05 * h + 0.5),
    "product": ("s = Sigmoid(h)  y = Mul(s, s)", lambda h: sigmoid(h) ** 2),
    "other probability": (
        "s = Sigmoid(h)  a = Sub(unit, s)  b = Mul(a, a)  y = Sub(unit, b)",
        lambda h: 1 - (1 - sigmoid(h)) ** 2,
    ),
    "softmax": ("y = Softmax(h)", softmax),
    "not evident": ("s = Sigmoid(h)  y = Add(s, s)", lambda h: sigmoid(2 * sigmoid(h))),
}


@pytest.mark.filterwarnings("ignore:the loss bce takes")
@pytest.mark.parametrize("case", PROBABILITIES)
def test_binary_cross_entropy_of_probabilities(case: str, tmp_path: Path) -> None:
    """They are probabilities by the model's graph, however it moves or combines them."""
    tail, of = PROBABILITIES[case]
    x = DRAW.standard_normal((3, 4))
    h = x + drawn((3, 4))
    sizes = ",".join(map(str, of(h).shape))
    text = f"""m (double[3,4] x, double[3,4] w) => (double[{sizes}] y)
        <int64[1] flat = {{-1}}, int64[1] one = {{1}}, int64[1] two = {{2}},
         double low = {{0.1}}, double high = {{0.9}}, double unit = {{1}}>
        {{ h = Add(x, w)  {tail} }}"""
    path = write_step(text, tmp_path, "bce", "none")
    target = DRAW.random(of(h).shape)

    def expected(h: Array) -> float:
        p = of(h)
        return float(-(target * np.log(p) + (1 - target) * np.log(1 - p)).mean())

    loss, gradient, _ = told(path, x, target=target)
    np.testing.assert_allclose(loss, expected(h), rtol=1e-7)
    np.testing.assert_allclose(gradient, numeric(expected, h), atol=1e-7)


@pytest.mark.filterwarnings("ignore:the loss bce takes")
def test_probabilities_of_0_and_1(tmp_path: Path) -> None:
    """Their logarithms are no less than -100, as in PyTorch, and gradients are numbers."""
    text = scores(1, 4).replace("y = Add(x, w)", "h = Add(x, w)  y = HardSigmoid(h)")
    path = write_step(text, tmp_path, "bce", "none")
    x, target = np.array([[-9.0, 9, -9, 9]]), np.array([[1.0, 1, 0, 0.5]])
    loss, gradient, _ = told(path, x, target=target)
    np.testing.assert_allclose(loss, (100 + 0 + 0 + 50) / 4)
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


@pytest.mark.parametrize("kind", [CROSS_ENTROPY, "nll"])
@pytest.mark.parametrize(
    ("tail", "axis"),
    [
        ("y = Softmax<axis = 1>(h)", 1),
        ("s = Softmax<axis = 0>(h)  y = Transpose(s)", 0),
        ("s = Softmax(h)  t = Unsqueeze(s, zero)  y = Squeeze(t, zero)", 1),
        ("s = Unsqueeze(h, zero)  t = Softmax(s)  y = Gather(t, first)", 1),
    ],
)
def test_a_loss_by_class_of_probabilities(kind: str, tail: str, axis: int, tmp_path: Path) -> None:
    """It is that of the scores before a Softmax over the classes."""
    text = f"""m (double[4,4] x, double[4,4] w) => (double[4,4] y)
        <int64[1] zero = {{0}}, int64 first = {{0}}> {{ h = Add(x, w)  {tail} }}"""
    path = write_step(text, tmp_path, kind, "none")
    x, labels = 3 * DRAW.standard_normal((4, 4)), DRAW.integers(0, 4, 4)

    def expected(h: Array) -> float:
        return picked(log_softmax(h, axis), labels, axis)

    loss, gradient, _ = told(path, x, labels=labels)
    np.testing.assert_allclose(loss, expected(x + drawn((4, 4))), rtol=1e-12)
    np.testing.assert_allclose(gradient, numeric(expected, x + drawn((4, 4))), atol=1e-8)


def test_a_softmax_over_other_dimensions_makes_scores(tmp_path: Path) -> None:
    text = scores(4, 4).replace("y = Add(x, w)", "h = Add(x, w)  y = Softmax<axis = 0>(h)")
    path = write_step(text, tmp_path, CROSS_ENTROPY, "none")
    labels = DRAW.integers(0, 4, 4)
    loss, _, y = told(path, DRAW.standard_normal((4, 4)), labels=labels)
    np.testing.assert_allclose(loss, picked(log_softmax(y, 1), labels, 1), rtol=1e-12)


def test_an_output_that_is_the_loss(tmp_path: Path) -> None:
    """Of one element in any shape; other outputs are left out."""
    text = """own (double[4,3] x, double[3] w) => (double[4,3] y, double[1,1] cost)
    { y = Mul(x, w)  s = Mul(y, y)  m = ReduceSum(s)  cost = Identity(m) }"""
    results, step = run_unsplit(
        write_step(text, tmp_path, "cost", "none"), [{"x": np.ones((4, 3))}], [0.0]
    )
    assert {"loss", "w.grad"} == results[0].keys() - {*step.evaluation} and step.data == ["x"]
    assert results[0]["loss"].shape == ()
    weight = drawn((3,))
    np.testing.assert_allclose(results[0]["loss"], 4 * (weight**2).sum(), rtol=1e-12)
    np.testing.assert_allclose(results[0]["w.grad"], 8 * weight, rtol=1e-12)


TWO = """two (float[4,3] x, float[3,3] w) => (float[4,3] y, float[4,3] z)
{ y = MatMul(x, w)  z = Relu(y) }"""


def test_the_output_that_a_loss_is_of(tmp_path: Path) -> None:
    x, target = np.ones((4, 3), np.float32), np.zeros((4, 3), np.float32)
    losses = []
    for of in ("y", "z"):
        path = write_step(TWO, tmp_path, "mse", "none", loss_of=of)
        losses.append(run_unsplit(path, [{"x": x, "target": target}], [0])[0][0]["loss"])
    model = ort.InferenceSession(str(tmp_path / "model.onnx"), quiet())
    expected = [(out**2).mean() for out in model.run(None, {"x": x})]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_an_output_that_is_named_as_the_loss_of_a_step_is(tmp_path: Path) -> None:
    """And other results with names of a step's own ports."""
    text = """own (double[4,3] x, double[3] w) => (double loss)
    { step = Mul(x, w)  seed = Mul(step, step)  gradient_norm = Relu(seed)
      learning_rate = Identity(gradient_norm)  loss = ReduceSum<keepdims = 0>(learning_rate) }"""
    path = write_step(text, tmp_path, "loss", "adam", clip_norm=1.0)
    results, step = run_unsplit(path, [{"x": np.ones((4, 3))}] * 2, [0.1] * 2)
    np.testing.assert_allclose(results[0]["loss"], 4 * (drawn((3,)) ** 2).sum(), rtol=1e-12)
    norm = np.linalg.norm(8 * drawn((3,)))
    np.testing.assert_allclose(results[0]["gradient_norm"], norm, rtol=1e-12)
    assert int(results[1]["step.next"]) == 2 and step.data == ["x"]
    fed = "own (float[4,3] loss, float[3] w) => (float[4,3] y) { y = Mul(loss, w) }"
    with pytest.raises(
        ModelError, match="the model has a tensor 'loss', a name that the step needs"
    ):
        write_step(fed, tmp_path, "mse")
    rate = fed.replace("loss", "learning_rate")
    with pytest.raises(
        ModelError, match="has a tensor 'learning_rate', a name that the step needs"
    ):
        write_step(rate, tmp_path, "mse")


def test_a_name_that_the_model_has_is_not_taken(tmp_path: Path) -> None:
    text = """named (float[4,3] target, float[3,3] w) => (float[4,3] y) { y = MatMul(target, w) }"""
    _, step = run_unsplit(
        write_step(text, tmp_path, "mse", "none"),
        [dict.fromkeys(("target", "target_"), np.ones((4, 3), np.float32))],
        [0],
    )
    assert step.data == ["target", "target_"]


@pytest.mark.parametrize(
    ("text", "how", "message"),
    [
        (scores(4, 5), {"loss": "hinge"}, "'hinge': give one of softmax-cross-entropy, nll"),
        (scores(4, 5), {"loss": "y"}, r"'y': .* \[4, 5\], but a loss must be a single number"),
        (TWO, {"loss": "mse"}, "mse: .* several outputs; give --loss-of with one of y, z"),
        (
            TWO,
            {"loss": "mse", "loss_of": "q"},
            "'q': the model has no such output; its outputs: y, z",
        ),
        (scores(4), {"loss": "nll"}, r"'y' has the shape \[4\]; a loss over classes needs"),
        (scores(4, 5), {"loss": "nll", "class_axis": 2}, "class axis 2: .* 'y' has 2 dimensions"),
        (scores(4, 5), {"loss": "nll", "class_axis": -3}, "class axis -3: .* 'y' has 2 dimensions"),
        (scores(4, 5), {"loss": "mse", "class_axis": 1}, "--class-axis: the loss 'mse' has none"),
        (
            "whole (float[4,3] x, float[3] w) => (int64[4] y) "
            "{ s = Mul(x, w)  y = ArgMax<axis = 1, keepdims = 0>(s) }",
            {"loss": "mse"},
            "'y' is of type int64, which has no gradient",
        ),
    ],
)
def test_losses_that_do_not_fit(
    text: str, how: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(StrategyError, match=message):
        write_step(text, tmp_path, optimizer="sgd", **how)
    assert not (tmp_path / "step.onnx").exists()


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    model = write_model(TWO, tmp_path)
    for path in (tmp_path / "none" / "step.onnx", model):
        with pytest.raises(OnnxparError, match=r"no such folder|is the model itself"):
            grad(model, path, loss="mse", loss_of="y", optimizer="sgd")
