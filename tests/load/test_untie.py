"""Vectors that an exporter has stored once for several nodes: found, told of, and taken apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from small_models import HEAD, write_text
from training.steps import ThreadTrainer, quiet, run_unsplit, shard, write_model

from onnxpar.cli.command_line import main
from onnxpar.load.untie import shared_vectors, untie
from onnxpar.trainer.checkpoint import Progress
from onnxpar.trainer.merge import merge
from onnxpar.training import grad

NORMS = """net (double[4,6] x, double[6] w1, double[6] w2, double[6,6] w3) => (double[4,6] y)
{ a = LayerNormalization(x, w1, w2)  h = MatMul(a, w3)  i = Identity(w1)
  b = LayerNormalization(h, i, w2)  t = Tanh(b)  c = Add(t, x)  y = Mul(c, w1) }"""
APART = """net (double[4,6] x, double[6] w1, double[6] w2, double[6,6] w3, double[6] v1,
double[6] v2, double[6] u1) => (double[4,6] y)
{ a = LayerNormalization(x, w1, w2)  h = MatMul(a, w3)
  b = LayerNormalization(h, v1, v2)  t = Tanh(b)  c = Add(t, x)  y = Mul(c, u1) }"""
COPIES = {"w1": "w1", "w2": "w2", "w3": "w3", "w1@1": "v1", "w1@2": "u1", "w2@1": "v2"}
"""The names of untied weights, and those of the same in the model that was written with them."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(NORMS, tmp_path)


def weights_of(path: Path) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def differences(
    folder: Path, weights: dict[str, np.ndarray], x: np.ndarray, target: np.ndarray
) -> dict[str, np.ndarray]:
    """Central differences of the loss in each weight, by onnxruntime."""
    text = APART if len(weights) > 3 else NORMS
    path = folder / "whole.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    session = ort.InferenceSession(str(path), quiet(), ["CPUExecutionProvider"])

    def loss(given: dict[str, np.ndarray]) -> float:
        feeds = {COPIES[n] if len(weights) > 3 else n: v for n, v in given.items()}
        (y,) = session.run(["y"], {"x": x, **feeds})
        return float(((y - target) ** 2).mean())

    found = {}
    for name, value in weights.items():
        found[name] = np.zeros_like(value)
        for at in np.ndindex(value.shape):
            step = np.zeros_like(value)
            step[at] = 1e-6
            up, down = (loss({**weights, name: value + sign * step}) for sign in (1, -1))
            found[name][at] = (up - down) / 2e-6
    return found


@pytest.mark.parametrize("untied", [False, True])
def test_each_copy_has_its_own_gradient(model: Path, untied: bool, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x, target = draw.standard_normal((4, 6)), draw.standard_normal((4, 6))
    weights = weights_of(model)
    if untied:
        weights |= {name: weights[name.partition("@")[0]] for name in COPIES if "@" in name}
        step = grad(model, tmp_path / "s.onnx", loss="mse", optimizer="none", untie=True)
    else:
        with pytest.warns(UserWarning, match=r"w1 \(read by 3 nodes\), w2 \(read by 2 nodes\)"):
            step = grad(model, tmp_path / "s.onnx", loss="mse", optimizer="none")
    assert set(step.gradients) == set(weights)
    made = run_unsplit(tmp_path / "s.onnx", [{"x": x, "target": target}], [0.0])[0][0]
    for name, expected in differences(tmp_path, weights, x, target).items():
        np.testing.assert_allclose(made[f"{name}.grad"], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_what_was_untied_is_merged_as_separate_weights(model: Path, tmp_path: Path) -> None:
    """The merged model computes what the step does, which trained each copy by itself."""
    grad(model, tmp_path / "step.onnx", loss="mse", optimizer="sgd", untie=True)
    draw = np.random.default_rng(0)
    batch = {"x": draw.standard_normal((4, 6)), "target": draw.standard_normal((4, 6))}
    with ThreadTrainer(shard(tmp_path / "step.onnx", "data-parallel 2")[0]) as trainer:
        for seed in range(3):
            trainer.step(batch, 0.1, seed)
        trainer.save(tmp_path / "c", Progress(3))
        told = trainer.evaluate(batch)["loss"]
    assert merge(tmp_path / "c", model, tmp_path / "trained.onnx") == 6
    found = weights_of(tmp_path / "trained.onnx")
    assert set(found) == set(COPIES)
    assert not np.allclose(found["w1"], found["w1@1"])
    onnx.checker.check_model(onnx.load(tmp_path / "trained.onnx"), full_check=True)
    session = ort.InferenceSession(str(tmp_path / "trained.onnx"), quiet())
    (y,) = session.run(["y"], {"x": batch["x"]})
    assert ((y - batch["target"]) ** 2).mean() == pytest.approx(told, rel=1e-9)


def test_the_command_warns_and_unties(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["grad", str(model), "--loss", "mse", "--optimizer", "sgd"]
    arguments += ["-o", str(tmp_path / "step.onnx")]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "3 parameters" in out and "w1 (read by 3 nodes)" in err and "--untie" in err
    assert main([*arguments, "--untie"]) == 0
    out, err = capsys.readouterr()
    assert "6 parameters" in out and err == ""


SHARED: dict[str, tuple[str, dict[str, int]]] = {
    "an embedding that is tied": (
        """m (int64[4] i, float[7,3] w) => (float[4,7] y)
        { h = Gather(w, i)  t = Transpose(w)  y = MatMul(h, t) }""",
        {},
    ),
    "a weight that two layers share": (
        """m (float[4,3] x, float[3,3] w) => (float[4,3] y)
        { h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, w) }""",
        {},
    ),
    "zeros that two layers begin with": (
        """m (float[4,3] x) => (float[4,3] y)
        <float[3,3] zeros = {0, 0, 0, 0, 0, 0, 0, 0, 0}>
        { h = MatMul(x, zeros)  r = Add(h, x)  g = MatMul(r, zeros)  y = Add(g, x) }""",
        {"zeros": 2},
    ),
    "a number": (
        """m (float[4,3] x) => (float[4,3] y) <float half = {0.5}>
        { h = Mul(x, half)  r = Relu(h)  y = Mul(r, half) }""",
        {},
    ),
    "statistics": (
        """m (float[2,3,4] x, float[3] w1, float[3] w2) => (float[2,3,4] y)
        <float[3] mean = {0, 0, 0}, float[3] variance = {1, 1, 1}>
        { h = BatchNormalization(x, w1, w2, mean, variance)
          y = BatchNormalization(h, w1, w2, mean, variance) }""",
        {"mean": 2, "variance": 2, "w1": 2, "w2": 2},
    ),
    "a bias and a scale behind a Cast": (
        """m (float[4,3] x, float16[3] w) => (float[4,3] y)
        { c = Cast<to = 1>(w)  h = Mul(x, c)  r = Relu(h)  y = Add(r, c) }""",
        {"w": 2},
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_what_is_shared(case: str, tmp_path: Path) -> None:
    text, expected = SHARED[case]
    path = write_text(HEAD + text, tmp_path / "model.onnx")
    proto = onnx.load(path)
    assert shared_vectors(proto.graph) == expected
    before = len(proto.graph.initializer)
    untie(proto.graph)
    assert shared_vectors(proto.graph) == {}
    assert len(proto.graph.initializer) == before + sum(n - 1 for n in expected.values())
    onnx.checker.check_model(proto, full_check=True)
    feeds = {
        i.name: np.ones([d.dim_value for d in i.type.tensor_type.shape.dim], "f4")
        for i in proto.graph.input
    }
    if "i" not in feeds:
        sessions = [
            ort.InferenceSession(m, quiet()) for m in (str(path), proto.SerializeToString())
        ]
        np.testing.assert_array_equal(*(s.run(["y"], feeds)[0] for s in sessions))


def test_calls_of_one_module_share_their_copy(tmp_path: Path) -> None:
    """The dynamo exporter says the parameters of each call: two calls of `a`, and one of `b`."""
    text = """m (float[4,3] x, float[3] w) => (float[4,3] y)
    { h = Add(x, w)  i = Tanh(h)  j = Add(i, w)  k = Tanh(j)  y = Add(k, w) }"""
    proto = onnx.load(write_text(HEAD + text, tmp_path / "model.onnx"))
    signature = "p_a_bias: PARAMETER target='a.bias'\np_b_bias: PARAMETER target='b.bias'"
    key = "pkg.torch.export.ExportedProgram.graph_signature"
    proto.graph.metadata_props.add(key=key, value=signature)
    for node, name in zip(proto.graph.node[::2], ("a", "b", "a"), strict=True):
        call = f"[target=torch.ops.aten.add.Tensor](args = (%x, %p_{name}_bias), kwargs = {{}})"
        node.metadata_props.add(key="pkg.torch.onnx.fx_node", value=call)
    assert shared_vectors(proto.graph) == {"w": 3}
    untie(proto.graph)
    assert [node.input[1] for node in proto.graph.node[::2]] == ["w", "w@1", "w"]
    assert shared_vectors(proto.graph) == {}
