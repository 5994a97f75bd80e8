"""Checkpoints become models: what was trained, as it is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from training.steps import CROSS_ENTROPY, ThreadTrainer, quiet, shard, write_step

from onnxpar.base.errors import ModelError
from onnxpar.trainer.checkpoint import Progress
from onnxpar.trainer.merge import merge

TRAINED = """net (float[8,6] x, float[6,9] w1, float[9] w2, float[9] w3, float[9,5] w4)
=> (float[8,5] y)
<float[9] mean = {0, 0, 0, 0, 0, 0, 0, 0, 0}, float[9] variance = {1, 1, 1, 1, 1, 1, 1, 1, 1},
float share = {0.5}, bool training = {1}>
{ h = MatMul(x, w1)
  n, m1, v1 = BatchNormalization<training_mode = 1, momentum = 0.5>(h, w2, w3, mean, variance)
  r = Relu(n)  d, mask = Dropout(r, share, training)  y = MatMul(d, w4) }"""


def probabilities_of(model: Path, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(str(model), quiet(), ["CPUExecutionProvider"])
    (y,) = session.run(["y"], {"x": x})
    odds = np.exp(y - y.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray, float]:
    """A folder with a model and a checkpoint of it, a batch, and the loss of the evaluation."""
    step = write_step(TRAINED, tmp_path, CROSS_ENTROPY, "sgd")
    draw = np.random.default_rng(0)
    x, labels = draw.standard_normal((8, 6)).astype(np.float32), draw.integers(0, 5, 8)
    with ThreadTrainer(shard(step, "data-parallel 2")[0]) as trainer:
        for seed in range(3):
            trainer.step({"x": x, "labels": labels}, 0.1, seed)
        trainer.save(tmp_path / "c", Progress(3))
        told = trainer.evaluate({"x": x, "labels": labels})
    return tmp_path, x, labels, told["loss"]


def test_a_model_exported_for_training_is_put_to_use(
    trained: tuple[Path, np.ndarray, np.ndarray, float],
) -> None:
    folder, x, labels, loss = trained
    assert merge(folder / "c", folder / "model.onnx", folder / "trained.onnx") == 6
    model = onnx.load(folder / "trained.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert "training" not in {t.name for t in model.graph.initializer}
    found = probabilities_of(folder / "trained.onnx", x)
    assert -np.log(found[range(8), labels]).mean() == pytest.approx(loss, rel=1e-5)


def test_constants_that_only_dropout_read_are_left_out(
    trained: tuple[Path, np.ndarray, np.ndarray, float],
) -> None:
    folder = trained[0]
    model = onnx.load(folder / "model.onnx")
    flags = [t for t in model.graph.initializer if t.name in ("share", "training")]
    for tensor in flags:
        model.graph.initializer.remove(tensor)
        model.graph.node.insert(
            0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
        )
    assert len(flags) == 2
    merge(folder / "c", model, folder / "trained.onnx")
    found = onnx.load(folder / "trained.onnx")
    assert [n.output[0] for n in found.graph.node if n.op_type == "Constant"] == ["share"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bytes", "proto"])
def test_models_in_memory(form: str, trained: tuple[Path, np.ndarray, np.ndarray, float]) -> None:
    folder = trained[0]
    proto = onnx.load(folder / "model.onnx")
    given = proto.SerializeToString() if form == "bytes" else proto
    assert merge(folder / "c", given, folder / "memory.onnx") == 6
    merge(folder / "c", folder / "model.onnx", folder / "file.onnx")
    assert (folder / "memory.onnx").read_bytes() == (folder / "file.onnx").read_bytes()
    with pytest.raises(ModelError, match="not an ONNX model"):
        merge(folder / "c", b"nothing", folder / "none.onnx")
    assert not (folder / "none.onnx").exists()


def test_it_stays_in_training_where_asked_for(
    trained: tuple[Path, np.ndarray, np.ndarray, float],
) -> None:
    folder = trained[0]
    merge(folder / "c", folder / "model.onnx", folder / "trained.onnx", training=True)
    graphs = [onnx.load(folder / name).graph for name in ("model.onnx", "trained.onnx")]
    assert list(graphs[0].node) == list(graphs[1].node)
