"""Two bits per element: 50 steps of hvd are the steps of the sharded graph, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from agreement import options
from training.steps import CROSS_ENTROPY, ThreadTrainer, write_model, write_step

from onnxpar import hvd
from onnxpar.base.errors import InputError
from onnxpar.hvd.two_bit import packed, unpacked
from onnxpar.planner import sharder
from onnxpar.training import grad

Array = np.ndarray
Arrays = dict[str, Array]
BATCH, STEPS, THRESHOLD = 8, 50, 0.01
MLP = """mlp (float[8,40] x, float[40,20] w1, float[20] w2, float[20,5] w3, float[5] w4)
=> (float[8,5] y) { h = Gemm(x, w1, w2)  r = Relu(h)  y = Gemm(r, w3, w4) }"""
DOUBLE = MLP.replace("float[", "double[")
"""Both send w1 in codes, and the rest, of less than 1 kB, as it is."""


def batches(dtype: str) -> list[Arrays]:
    made = []
    for number in range(STEPS):
        random = np.random.default_rng(number)
        labels = random.integers(0, 5, BATCH)
        made.append({"x": random.standard_normal((BATCH, 40)).astype(dtype), "labels": labels})
    return made


def in_the_graph(text: str, dtype: str, optimizer: str, ranks: int, folder: Path) -> list[Arrays]:
    """The weights after each step of the sharded step, from the weights of the model."""
    step = write_step(text, folder, optimizer=optimizer)
    par = folder / "step.par"
    how = replace(options(f"data-parallel {ranks}"), compression=f"2bit:{THRESHOLD}")
    sharder.shard(step, par, how)
    weights = []
    with ThreadTrainer(par) as trainer:
        names = [name for name in trainer.bundle.states if name in ("w1", "w2", "w3", "w4")]
        weights.append({name: trainer.session.states.read(name) for name in names})
        for batch in batches(dtype):
            trainer.step(batch, 0.05)
            weights.append({name: trainer.session.states.read(name) for name in names})
    return weights


def in_a_loop(
    text: str, dtype: str, optimizer: Any, ranks: int, start: Arrays, folder: Path
) -> list[list[Arrays]]:
    """The weights after each step of hvd, on each rank."""
    local = BATCH // ranks
    model = write_model(text.replace(f"[{BATCH},", f"[{local},"), folder)
    grad(model, folder / "step.onnx", loss=CROSS_ENTROPY, optimizer="none")
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 3

    def body() -> list[Arrays]:
        session = ort.InferenceSession(str(folder / "step.onnx"), quiet)
        params = {name: array.copy() for name, array in start.items()}
        distributed = hvd.DistributedOptimizer(optimizer(), gc_type="2bit", threshold=THRESHOLD)
        weights = []
        for batch in batches(dtype):
            mine = slice(hvd.rank() * local, (hvd.rank() + 1) * local)
            feeds = {name: array[mine] for name, array in batch.items()}
            grads = session.run([f"{name}.grad" for name in params], {**feeds, **params})
            distributed.step(params, dict(zip(params, grads, strict=True)))
            weights.append({name: array.copy() for name, array in params.items()})
        return weights

    return hvd.run_on_threads(body, ranks)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize(
    "ranks,text,dtype,bound",
    [(2, DOUBLE, "float64", 1e-12), (4, DOUBLE, "float64", 1e-12), (4, MLP, "float32", 1e-5)],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_trajectories(
    ranks: int, text: str, dtype: str, bound: float, optimizer: str, tmp_path: Path
) -> None:
    (tmp_path / "graph").mkdir()
    (tmp_path / "loop").mkdir()
    start, *expected = in_the_graph(text, dtype, optimizer, ranks, tmp_path / "graph")
    made = {"sgd": lambda: hvd.SGD(0.05), "adam": lambda: hvd.Adam(0.05)}[optimizer]
    assert len(expected) == STEPS
    for found in in_a_loop(text, dtype, made, ranks, start, tmp_path / "loop"):
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            for name in theirs:
                scale = np.abs(theirs[name]).max()
                np.testing.assert_allclose(
                    mine[name], theirs[name], rtol=0, atol=bound * scale, err_msg=f"{number} {name}"
                )
    moved = max(np.abs(expected[-1][n] - start[n]).max() for n in start)
    assert moved > 10 * bound


def test_codes_come_back() -> None:
    for length in range(10):
        signs = np.random.default_rng(length).integers(-1, 2, length).astype(np.int8)
        codes = packed(signs)
        assert codes.dtype == np.uint8 and len(codes) == -(-length // 4)
        np.testing.assert_array_equal(unpacked(codes, length), signs)


@pytest.mark.usefixtures("medium")
def test_a_gradient_that_is_not_finite_spoils_the_sums_and_keeps_the_remainders() -> None:
    def body() -> tuple[list[float], list[float]]:
        params = {"w": np.zeros(200)}
        optimizer = hvd.DistributedOptimizer(
            hvd.SGD(1.0), op=hvd.Sum, gc_type="2bit", threshold=1.0
        )
        optimizer.step(params, {"w": first(0.75, -2.5)})
        before = params["w"][:3].tolist()
        reduced = optimizer.synchronize({"w": first(np.inf if hvd.rank() else 0.25)})["w"]
        assert np.isnan(reduced).all()
        optimizer.step(params, {"w": first(0.25)})  # 0.75 was kept
        return before, params["w"][:3].tolist()

    for before, after in hvd.run_on_threads(body, 2):
        assert before == [0.0, 2.0, 0.0]
        assert after == [-2.0, 4.0, 0.0]


def first(*values: float) -> Array:
    """An array of 200 elements that begins with these."""
    return np.array([*values, *[0.0] * (200 - len(values))])


def test_what_two_bits_cannot_send() -> None:
    def body() -> None:
        optimizer = hvd.DistributedOptimizer(hvd.SGD(1.0), gc_type="2bit")
        with pytest.raises(InputError, match="needs float32 or float64, but 'w' is float16"):
            optimizer.step({"w": np.ones(600, "f2")}, {"w": np.ones(600, "f2")})

    hvd.run_on_threads(body, 1)


def test_ranks_with_different_thresholds() -> None:
    def body() -> None:
        how = {"gc_type": "2bit", "threshold": 1.0 + hvd.rank()}
        optimizer = hvd.DistributedOptimizer(hvd.SGD(1.0), **how)  # type: ignore[arg-type]
        message = "rank 0 has 2bit with threshold 1.0, but rank 1 has 2bit with threshold 2.0"
        with pytest.raises(InputError, match=message):
            optimizer.step({"w": np.ones(200)}, {"w": np.ones(200)})

    hvd.run_on_threads(body, 2)
