"""Experts whose weights are apart are trained: each weight keeps its name and shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from agreement import options
from onnx import numpy_helper

from onnxpar.cli.command_line import main
from onnxpar.planner import sharder

MODEL = Path(__file__).parents[2] / "models" / "experts" / "mixtral.loop.dynamo.onnx"
LAYER = "network.model.layers.0.block_sparse_moe.experts"
IDS = np.arange(48).reshape(4, 12)
LABELS = np.roll(IDS, -1, 1)
DIFFERENCE = 1e-2


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of SGD."""
    return write(tmp_path_factory.mktemp("step") / "step.onnx", "sgd")


def write(path: Path, optimizer: str) -> Path:
    """Writes a step of the exported model."""
    sizes = ["--dim", "batch=4", "--dim", "seq=12"]
    how = ["--loss", "softmax-cross-entropy", "--optimizer", optimizer, "-o", str(path)]
    assert main(["grad", str(MODEL), *sizes, *how]) == 0
    return path


def values_of(path: Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def loss_of(name: str, at: tuple[int, ...], by: float) -> float:
    """The loss of the exported model if one element of a weight differs."""
    model = onnx.load(MODEL)
    (weight,) = (t for t in model.graph.initializer if t.name == name)
    value = numpy_helper.to_array(weight).copy()
    value[at] += by
    weight.CopyFrom(numpy_helper.from_array(value, name))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options)
    scores = session.run(None, {"input_ids": IDS})[0].astype(np.float64)
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return -float(np.take_along_axis(logs, LABELS[..., None], -1).mean())


@pytest.mark.slow
def test_gradients_are_those_of_the_exported_model(step: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(step), options)
    names = [port.name for port in session.get_outputs()]
    feeds = {"input_ids": IDS, "labels": LABELS, "learning_rate": np.array(1, np.float32)}
    after = dict(zip(names, session.run(None, feeds), strict=True))
    before = values_of(step)
    for expert in range(4):
        for part in ("w1", "w2", "w3"):
            name = f"{LAYER}.{expert}.{part}.weight"
            gradient = before[name] - after[f"{name}.next"]
            at = tuple(map(int, np.unravel_index(np.abs(gradient).argmax(), gradient.shape)))
            ends = [loss_of(name, at, by) for by in (DIFFERENCE, -DIFFERENCE)]
            assert gradient[at] == pytest.approx((ends[0] - ends[1]) / (2 * DIFFERENCE), abs=2e-5)


def test_weights_keep_their_names_and_shapes(step: Path) -> None:
    found, stored = values_of(step), values_of(MODEL)
    experts = [name for name in stored if name.startswith(LAYER)]
    assert len(experts) == 12
    for name in experts:
        np.testing.assert_array_equal(found[name], stored[name])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("how", ["data-parallel 3", "tensor-parallel 2", "zero3 2"])
def test_ranks_train_like_one(step: Path, how: str) -> None:
    preset, devices = how.split()
    assert main(["check", str(step), "--preset", preset, "--devices", devices]) == 0


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "optimizer, mesh",
    [("sgd", "ep=3"), ("sgd", "dp=2,ep=2"), ("sgd", "ep=2,tp=2"), ("adamw", "ep=4")],
)
def test_experts_are_split(optimizer: str, mesh: str, step: Path, tmp_path: Path) -> None:
    """A rank stores a part of each expert's weights, and computes with the whole weights of its
    own: all-to-alls bring these, and take their gradients back."""
    if optimizer != "sgd":
        step = write(tmp_path / "step.onnx", optimizer)
    where = ["--mesh", mesh, "--preset", "expert-parallel"]
    assert main(["check", str(step), *where, "--train", "--steps", "3"]) == 0
    plan = sharder.plan(step, options(f"expert-parallel {mesh}"))[0]
    assert sum(c.kind == "AllToAll" for c in plan.collectives) == 6
    over = plan.mesh.sizes["ep"]
    states = [port for port in plan.inputs if LAYER in port.name]
    assert len(states) == (12 if optimizer == "sgd" else 36)
    for port in states:
        assert port.layout is not None
        assert port.layout.local_shape(plan.mesh, 0)[0] == -(-port.layout.shape[0] // over)
