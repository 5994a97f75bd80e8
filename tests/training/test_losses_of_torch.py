"""Losses and their settings against PyTorch's, and over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.steps import CROSS_ENTROPY, MLP, ThreadTrainer, run_unsplit, shard, write_step

from onnxpar.base.errors import StrategyError
from onnxpar.trainer.loop import evaluate

NUMBERS = json.loads(Path(__file__).with_name("losses.json").read_text())
"""Written by losses_in_torch.py."""


def str_of(case: dict[str, Any]) -> str:
    return "-".join([case["shape"], case["loss"], *case["how"]])


@pytest.mark.parametrize("case", NUMBERS["cases"], ids=str_of)
def test_values_and_gradients(case: dict[str, Any], tmp_path: Path) -> None:
    check(case, "double", 1e-9, tmp_path)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("case", NUMBERS["cases"], ids=str_of)
def test_values_and_gradients_in_float32(case: dict[str, Any], tmp_path: Path) -> None:
    check(case, "float", 1e-5, tmp_path)


def check(case: dict[str, Any], kind: str, tolerance: float, folder: Path) -> None:
    given = NUMBERS["inputs"][case["shape"]]
    dtype = np.float64 if kind == "double" else np.float32
    sizes = ",".join(map(str, np.shape(given["y"])))
    tail = "y = Identity(z)"
    if case["loss"] in ("nll", "kl", "kl-mean"):
        tail = "y = LogSoftmax<axis = 1>(z)"
    text = f"""m ({kind}[{sizes}] x, {kind}[{sizes}] w) => ({kind}[{sizes}] y)
    {{ z = Add(x, w)  {tail} }}"""
    path = write_step(text, folder, case["loss"], "none", class_axis=axis_of(case), **case["how"])
    drawn = np.random.default_rng([*b"w"]).standard_normal(np.shape(given["y"]))
    labels = case["target"] == "labels"
    target = np.array(given[case["target"]], np.int64 if labels else dtype)
    batch = {"x": (given["y"] - drawn).astype(dtype), "labels" if labels else "target": target}
    told, _ = run_unsplit(path, [batch], [0.0])
    np.testing.assert_allclose(told[0]["loss"], case["value"], rtol=tolerance)
    np.testing.assert_allclose(told[0]["w.grad"], case["grad"], rtol=tolerance, atol=tolerance)


def axis_of(case: dict[str, Any]) -> int | None:
    by_class = case["loss"] in (CROSS_ENTROPY, "nll", "kl", "kl-mean")
    return 1 if by_class and case["shape"] == "spatial" else None


def test_a_divergence_takes_the_logarithm_of_a_softmax(tmp_path: Path) -> None:
    case = next(c for c in NUMBERS["cases"] if c["loss"] == "kl" and c["shape"] == "flat")
    given = NUMBERS["inputs"]["flat"]
    text = """m (double[6,5] x, double[6,5] w) => (double[6,5] y)
    { z = Add(x, w)  y = Softmax<axis = 1>(z) }"""
    drawn = np.random.default_rng([*b"w"]).standard_normal((6, 5))
    batch = {"x": given["y"] - drawn, "target": np.array(given["part"])}
    told, _ = run_unsplit(write_step(text, tmp_path, "kl", "none"), [batch], [0.0])
    np.testing.assert_allclose(told[0]["loss"], case["value"], rtol=1e-9)
    np.testing.assert_allclose(told[0]["w.grad"], case["grad"], rtol=1e-9, atol=1e-11)


WEIGHTED = {"class_weights": [1, 2, 0.5, 0, 3], "label_smoothing": 0.1}
LABELS = np.array([0, 1, 4, 3, -100, 2, 2, 1])


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("loss", "how", "layout"),
    [
        (CROSS_ENTROPY, WEIGHTED, "data-parallel 3"),
        (CROSS_ENTROPY, WEIGHTED, "class-parallel 2"),
        (CROSS_ENTROPY, WEIGHTED, "tensor-parallel 2"),
        ("kl", {}, "zero2 2"),
        ("huber", {"delta": 0.5}, "data-parallel 2"),
        ("bce", {"pos_weight": [1, 2, 3, 4, 5]}, "tensor-parallel 2"),
    ],
)
def test_ranks_have_the_same_loss(
    loss: str, how: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    path = write_step(MLP, tmp_path, loss, **how)
    draw = np.random.default_rng(2)
    batch = {"x": draw.standard_normal((8, 6)).astype(np.float32)}
    if loss == CROSS_ENTROPY:
        batch["labels"] = LABELS
    else:
        batch["target"] = draw.random((8, 5)).astype(np.float32)
    told, step = run_unsplit(path, [batch] * 3, [0.1] * 3)
    par, _ = shard(path, layout)
    with ThreadTrainer(par) as trainer:
        for expected in told:
            measured = trainer.evaluate(batch)
            found = trainer.step(batch, 0.1)
            np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
            np.testing.assert_allclose(measured["loss"], expected["loss"], rtol=1e-5)
        for slot in step.parameters:
            value = trainer.session.states.read(slot.input)
            np.testing.assert_allclose(value, told[-1][slot.output], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("turns", [1, 2])
def test_means_of_several_batches(turns: int, tmp_path: Path) -> None:
    """The loss is divided by the weights of all labels once, the accuracy by their number."""
    how = {"class_weights": [1, 2, 0.5, 0, 3]}
    path = write_step(MLP, tmp_path, accumulate=turns, **how)
    draw = np.random.default_rng(2)
    x = draw.standard_normal((32, 6)).astype(np.float32)
    labels = np.concatenate([LABELS, np.full(8, 3), np.full(8, 4), np.full(8, -100)])
    whole_step = tmp_path / "whole"
    whole_step.mkdir()
    whole = write_step(MLP.replace("8", "32"), whole_step, **how)
    told, _ = run_unsplit(whole, [{"x": x, "labels": labels}], [0.0])
    par, _ = shard(path, "data-parallel 2")
    with ThreadTrainer(par) as trainer:
        found = evaluate(trainer, trainer.batches_of({"x": x, "labels": labels}, trains=False))
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(found[name], told[0][f"evaluation.{name}"], rtol=1e-5)


def test_weights_of_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", np.arange(5))
    for given in (str(tmp_path / "weights.npy"), "0,1,2,3,4", np.arange(5)):
        path = write_step(MLP, tmp_path, class_weights=given)
        batch = {"x": np.ones((8, 6), np.float32), "labels": np.zeros(8, np.int64)}
        told, _ = run_unsplit(path, [batch], [0.0])
        assert np.isnan(told[0]["loss"])  # all weights are zero


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"loss": "mse", "label_smoothing": 0.1}, "--label-smoothing: the loss 'mse' has none"),
        ({"loss": "nll", "label_smoothing": 0.1}, "--label-smoothing: the loss 'nll' has none"),
        ({"loss": "y", "class_weights": "1,2"}, "--class-weights: the loss 'y' has none"),
        ({"loss": "mse", "delta": 1.0}, "--delta: the loss 'mse' has none; only huber, smooth-l1"),
        ({"loss": "l1", "pos_weight": 2}, "--pos-weight: the loss 'l1' has none; only bce"),
        ({"label_smoothing": 1.5}, "--label-smoothing 1.5: must be from 0 to 1"),
        ({"loss": "huber", "delta": 0.0}, "--delta 0.0: must be above 0"),
        ({"class_weights": "1,2"}, "--class-weights: there are 2 weights, but 5 classes"),
        ({"class_weights": "1,x"}, "--class-weights 1,x: give numbers"),
        ({"class_weights": "none.npy"}, "--class-weights none.npy: give numbers"),
        ({"class_weights": [1, -1]}, "--class-weights: give a vector of finite numbers"),
        ({"class_weights": [[1, 1]]}, r"these have the shape \[1, 2\]"),
        ({"loss": "bce", "pos_weight": [1, 2]}, r"--pos-weight: there are 2 numbers, .* \[8, 5\]"),
        ({"label_smoothing": 0.1, "sample_rate": 0.5}, "--label-smoothing and --sample-rate"),
    ],
)
def test_settings_that_cannot_be(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=message):
        write_step(MLP, tmp_path, **({"loss": CROSS_ENTROPY} | how))
