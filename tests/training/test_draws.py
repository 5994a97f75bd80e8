"""What is random follows from a seed: whatever the ranks, and from run to run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from small_models import HEAD
from training.models import DROPOUT
from training.steps import Array, ThreadTrainer, batches, check_training, quiet, shard, write_step

from onnxpar.base.errors import ModelError
from onnxpar.trainer.checkpoint import Checkpoint
from onnxpar.trainer.data import Data
from onnxpar.trainer.loop import Run, records


def drawn(nodes: str, folder: Path, seed: int, size: int) -> Array:
    """What a model of a bias behind some random node draws, by the loss's gradient: `d`."""

    text = f"""m (float[2,{size}] x, float[{size}] w) => (float[2,{size}] y)
    <float ratio = {{0.25}}, bool training = {{1}}>
    {{ {nodes}  y = Add(d, w) }}"""
    path = write_step(text, folder, "mse", "none")
    model = onnx.load(path)
    model.graph.output.append(onnx.helper.make_tensor_value_info("d", 1, [2, size]))
    session = ort.InferenceSession(model.SerializeToString(), quiet())
    feeds = {
        "x": np.full((2, size), 0.3 if "Bernoulli" in nodes else 1, np.float32),
        "target": np.zeros((2, size), np.float32),
        "seed": np.array(seed),
    }
    return np.asarray(session.run(["d"], feeds)[0])


@pytest.mark.parametrize(
    ("nodes", "mean", "deviation", "low", "high"),
    [
        ("d = Dropout(x, ratio, training)", 1, (1 / 3) ** 0.5, 0, 4 / 3),
        ("d = RandomUniformLike<low = -1.0, high = 3.0>(x)", 1, 4 / 12**0.5, -1, 3),
        ("d = RandomNormalLike<mean = 2.0, scale = 0.5>(x)", 2, 0.5, -1, 5),
        ("d = Bernoulli(x)", 0.3, 0.21**0.5, 0, 1),
    ],
)
def test_distributions(
    nodes: str, mean: float, deviation: float, low: float, high: float, tmp_path: Path
) -> None:
    """To within four standard errors; elements, rows and seeds have nothing to do with each
    other."""
    size = 2000
    first, second = (drawn(nodes, tmp_path, seed, size) for seed in (0, 1))
    error = deviation / (2 * size) ** 0.5
    for found in (first, second):
        assert abs(found.mean() - mean) < 4 * error
        assert found.std() == pytest.approx(deviation, rel=0.05)
        assert found.min() >= low and found.max() <= high
        assert len(np.unique(found)) > 1
    centred = [(a - mean).reshape(-1) / deviation for a in (first, second)]
    rows = (first - mean) / deviation
    for a, b in (centred, (rows[0], rows[1]), (rows[0][1:], rows[0][:-1])):
        assert abs((a * b).mean()) < 4.5 / len(a) ** 0.5
    np.testing.assert_array_equal(first, drawn(nodes, tmp_path, 0, size))


def test_two_nodes_draw_apart(tmp_path: Path) -> None:
    nodes = "a = RandomNormalLike(x)  b = RandomNormalLike(x)  d = Mul(a, b)"
    found = drawn(nodes, tmp_path, 3, 2000)
    assert abs(found.mean()) < 4.5 / found.size**0.5


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout", ["data-parallel 2", "data-parallel 3", "tensor-parallel 3", "zero3 dp=2,tp=2"]
)
def test_ranks_draw_what_one_draws(layout: str, tmp_path: Path) -> None:
    check_training(write_step(DROPOUT, tmp_path), layout, 6)


def test_gradients_pass_what_was_kept(tmp_path: Path) -> None:
    """Scaled as it was."""

    text = """m (float[4,50] x, float[50] w) => (float[4,50] y)
    <float ratio = {0.25}, bool training = {1}>
    { a = Mul(x, w)  y = Dropout(a, ratio, training) }"""
    path = write_step(text, tmp_path, "mse", "none")
    model = onnx.load(path)
    model.graph.output.append(onnx.helper.make_tensor_value_info("y", 1, [4, 50]))
    session = ort.InferenceSession(model.SerializeToString(), quiet())
    x = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    feeds = {"x": x, "target": np.zeros((4, 50), np.float32), "seed": np.array(5)}
    y, gradient = session.run(["y", "w.grad"], feeds)
    kept = y != 0
    assert 0.1 < 1 - kept.mean() < 0.4
    expected = (2 * y / y.size * kept / 0.75 * x).sum(0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_seed_of_a_step(tmp_path: Path) -> None:
    par, plan = shard(write_step(DROPOUT, tmp_path), "data-parallel 2")
    (batch,) = batches(plan, 1)
    with ThreadTrainer(par) as trainer:
        losses = [trainer.step(batch, 0.0, seed)["loss"] for seed in (1, 2, 1, 1 << 40, 0)]
    assert losses[0] == losses[2] and len({*losses}) == 4


def test_a_run_draws_anew_in_each_step_and_goes_on_as_it_would_have(tmp_path: Path) -> None:
    par, plan = shard(write_step(DROPOUT, tmp_path), "data-parallel 2")
    (batch,) = batches(plan, 1)

    def train(**how: object) -> list[float]:
        with ThreadTrainer(par) as trainer:
            data = Data.of(batch, trainer.data, trainer.spec.batch)
            run = Run(6, 0.01, shuffle=False, **how)  # type: ignore[arg-type]
            return [r.values["loss"] for r in records(trainer, data, run)]

    at_once = train()
    assert len({*at_once}) == 6 and train(seed=1) != at_once
    folder = tmp_path / "c"
    with ThreadTrainer(par) as trainer:
        data = Data.of(batch, trainer.data, trainer.spec.batch)
        list(records(trainer, data, Run(3, 0.01, shuffle=False, checkpoint=folder)))
    assert Checkpoint.load(folder).progress.step == 3
    assert train(checkpoint=folder, resume=True) == at_once[3:]


def test_dropout_that_is_off_needs_no_seed(tmp_path: Path) -> None:
    off = DROPOUT.replace("bool training = {1}", "bool training = {0}")
    path = write_step(off, tmp_path)
    assert "seed" not in {p.name for p in onnx.load(path).graph.input}
    check_training(path, "data-parallel 2", 3)


def test_draws_in_loops_are_refused_by_name(tmp_path: Path) -> None:
    text = """m (float[4] x, float[4] w) => (float[4] y) <int64 n = {3}, bool go = {1}>
    { h = Mul(x, w)  y = Loop<body = b (int64 i, bool c, float[4] s) => (bool d, float[4] t)
        { d = Identity(c)  r = RandomNormalLike(s)  t = Add(s, r) }>(n, go, h) }"""
    onnx.parser.parse_model(HEAD + text)
    with pytest.raises(ModelError, match=r"RandomNormalLike '.*' draws random .* body of a loop"):
        write_step(text, tmp_path, "mse")
