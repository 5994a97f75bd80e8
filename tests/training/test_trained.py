"""Which weights are found to be trained, and how users choose others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from committed import MODELS
from onnx import numpy_helper
from small_models import HEAD

import onnxpar.training.gradients  # noqa: F401  (registers the rules, which say what is trained)
from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.load.load import Model, load
from onnxpar.load.loading import LoadRequest
from onnxpar.training import grad
from onnxpar.training.gradients.trained import find_trained

F32 = np.float32
DRAW = np.random.default_rng(4)
Weights = dict[str, np.ndarray]

TRAINING = LoadRequest(for_training=True)


def saved(folder: Path, text: str, **weights: np.ndarray) -> Path:
    """A model from its text, with these weights; what the text lacks is drawn."""
    proto = onnx.parser.parse_model(HEAD + text)
    weights = {
        name: value.astype(F32) if value.dtype == float else value
        for name, value in weights.items()
    }
    for port in [i for i in proto.graph.input if i.name.startswith(("w", *weights))]:
        shape = [d.dim_value for d in port.type.tensor_type.shape.dim]
        value = weights.get(port.name, DRAW.standard_normal(shape).astype(np.float32))
        assert list(value.shape) == shape
        proto.graph.initializer.append(numpy_helper.from_array(value, port.name))
        proto.graph.input.remove(port)
    onnx.save(proto, folder / "model.onnx")
    return folder / "model.onnx"


def read(folder: Path, text: str, **weights: np.ndarray) -> Model:
    return load(saved(folder, text, **weights), TRAINING)


def names(model: Model, **how: list[str]) -> list[str]:
    return [t.name for t in find_trained(model, **how).trained]


def sinusoid(rows: int, columns: int) -> np.ndarray:
    """Rows of sines, then cosines, of positions times frequencies."""
    angles = np.arange(rows)[:, None] * 100.0 ** (-np.arange(columns // 2) / (columns // 2))
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


FOUND: dict[str, tuple[str, Weights, list[str]]] = {
    "weights and biases": (
        """m (float[4,6] x, float[6,5] w1, float[5] w2, float[5] w3, float[5] w4)
        => (float[4,5] y)
        { h = MatMul(x, w1)  a = Add(h, w2)  y = LayerNormalization(a, w3, w4) }""",
        {},
        ["w1", "w2", "w3", "w4"],
    ),
    "a convolution and its batch-norm": (
        """m (float[4,3,5,5] x, float[2,3,3,3] w1, float[2] w2, float[2] w3, float[2] w4,
        float[2] w5) => (float[4,2,3,3] y)
        { h = Conv(x, w1)
          y, u, v = BatchNormalization<training_mode = 1>(h, w2, w3, w4, w5) }""",
        {},
        ["w1", "w2", "w3"],
    ),
    "a table, whose rows are looked up": (
        """m (int64[4] i, float[7,3] w1, float[3,2] w2) => (float[4,2] y)
        { h = Gather(w1, i)  y = MatMul(h, w2) }""",
        {},
        ["w1", "w2"],
    ),
    "through what moves elements": (
        """m (float[4,6] x, float[5,6] w1, float[30] w2) => (float[4,5] y)
        <int64[2] shape = {6, 5}>
        { t = Transpose(w1)  h = MatMul(x, t)  r = Reshape(w2, shape)  g = MatMul(x, r)
          y = Add(h, g) }""",
        {},
        ["w1", "w2"],
    ),
    "numbers are not": (
        """m (float[4,6] x, float[6,5] w, float[1] c, float d, float[1,1] e) => (float[4,5] y)
        { h = MatMul(x, w)  a = Mul(h, c)  b = Add(a, d)  y = Div(b, e) }""",
        {"c": np.array([2], F32), "d": np.array(0.5, F32), "e": np.array([[3]], F32)},
        ["w"],
    ),
    "a bias of one class is": (
        """m (float[4,6] x, float[6,1] w1, float[1] w2) => (float[4,1] y)
        { h = MatMul(x, w1)  y = Add(h, w2) }""",
        {},
        ["w1", "w2"],
    ),
    "masks are not": (
        """m (float[2,5,6] x, float[6,5] w, float[5,5] low, float[5,5] ones) => (float[2,5,5] y)
        { h = MatMul(x, w)  a = Add(h, low)  p = Softmax(a)  y = Mul(p, ones) }""",
        {
            "low": np.triu(np.full((5, 5), np.finfo(F32).min, F32), 1),
            "ones": np.tril(np.ones((5, 5), F32)),
        },
        ["w"],
    ),
    "a mask of infinities is not": (
        """m (float[2,5,6] x, float[6,5] w, float[5,5] low) => (float[2,5,5] y)
        { h = MatMul(x, w)  y = Add(h, low) }""",
        {"low": np.triu(np.full((5, 5), -np.inf, F32), 1)},
        ["w"],
    ),
    "tables of sines that are added are not": (
        """m (int64[2,8] i, float[9,6] w, float[8,6] sines) => (float[2,8,6] y)
        { h = Gather(w, i)  y = Add(h, sines) }""",
        {"sines": sinusoid(8, 6)},
        ["w"],
    ),
    "tables of sines that are looked up are not": (
        """m (int64[2,8] i, int64[2,8] at, float[9,6] w, float[8,6] sines) => (float[2,8,6] y)
        { h = Gather(w, i)  s = Gather(sines, at)  y = Add(h, s) }""",
        {"sines": sinusoid(8, 6)},
        ["w"],
    ),
    "rotary tables are not": (
        """m (float[2,8,6] x, float[6,6] w, float[1,8,6] cosines, float[8,6] sines)
        => (float[2,8,6] y)
        { h = MatMul(x, w)  a = Mul(h, cosines)  b = Mul(h, sines)  y = Add(a, b) }""",
        {"cosines": sinusoid(8, 12)[None, :, 6:], "sines": sinusoid(8, 12)[:, :6]},
        ["w"],
    ),
    "learned positions are": (
        """m (int64[2,8] i, float[9,6] w1, float[1,8,6] w2) => (float[2,8,6] y)
        { h = Gather(w1, i)  y = Add(h, w2) }""",
        {},
        ["w1", "w2"],
    ),
    "a weight that two nodes read, once": (
        """m (int64[4] i, float[7,3] w) => (float[4,7] y)
        { h = Gather(w, i)  t = Transpose(w)  y = MatMul(h, t) }""",
        {},
        ["w"],
    ),
    "what Constant nodes hold is not": (
        """m (float[2,2] x, float[2,2] w) => (float[2,2] y)
        { c = Constant<value = float[2,2] {1.5, 2.5, 3.5, 4.5}>()  h = MatMul(x, c)
          y = MatMul(h, w) }""",
        {},
        ["w"],
    ),
    "a slope of PRelu is": (
        """m (float[4,3,5] x, float[3,1] w) => (float[4,3,5] y) { y = PRelu(x, w) }""",
        {},
        ["w"],
    ),
    "a class token, expanded and joined": (
        """m (float[2,4,3] x, float[3,3] w1, float[1,1,3] w2) => (float[2,5,3] y)
        <int64[3] shape = {2, 1, 3}>
        { h = MatMul(x, w1)  t = Expand(w2, shape)  y = Concat<axis = 1>(t, h) }""",
        {},
        ["w1", "w2"],
    ),
    "a table that multiplies is": (
        """m (float[2,8,6] x, float[6,6] w, float[8,6] scales) => (float[2,8,6] y)
        { h = MatMul(x, w)  y = Mul(h, scales) }""",
        {"scales": DRAW.standard_normal((8, 6)).astype(F32)},
        ["w", "scales"],
    ),
    "a normalized classifier is": (
        """m (float[4,6] x, float[6,3] w1, float[5,3] w2) => (float[4,5] y)
        { h = MatMul(x, w1)  e = LpNormalization<axis = 1>(h)  n = LpNormalization<axis = 1>(w2)
          t = Transpose(n)  y = MatMul(e, t) }""",
        {},
        ["w1", "w2"],
    ),
    "a classifier over its norm is": (
        """m (float[4,3] x, float[5,3] w) => (float[4,5] y)
        <int64[1] last = {1}>
        { l = ReduceL2(w, last)  n = Div(w, l)  t = Transpose(n)  y = MatMul(x, t) }""",
        {},
        ["w"],
    ),
    "a weight by its direction and its length is": (
        """m (float[4,3] x, float[5,3] w1, float[5,1] w2) => (float[4,5] y)
        <int64[1] last = {1}>
        { l = ReduceL2(w1, last)  d = Div(w1, l)  n = Mul(d, w2)  t = Transpose(n)
          y = MatMul(x, t) }""",
        {},
        ["w1", "w2"],
    ),
    "prototypes and their widths are": (
        """m (float[4,3] x, float[5,3] w1, float[5] w2) => (float[4,5] y)
        <int64[1] one = {1}, int64[1] last = {2}>
        { u = Unsqueeze(x, one)  d = Sub(u, w1)  s = Mul(d, d)  r = ReduceSum<keepdims = 0>(s, last)
          e = Exp(w2)  y = Div(r, e) }""",
        {},
        ["w1", "w2"],
    ),
    "a decay of states is": (
        """m (float[4,3] x, float[3,5] w) => (float[4,3,5] y)
        <int64[1] last = {2}>
        { e = Exp(w)  n = Neg(e)  u = Unsqueeze(x, last)  y = Mul(u, n) }""",
        {"w": np.log(np.arange(1, 6, dtype=F32))[None].repeat(3, 0)},
        ["w"],
    ),
    "grids are not": (
        """m (float[2,8,2] x, float[2,2] w, float[8,2] cells) => (float[2,8,2] y)
        { h = MatMul(x, w)  y = Add(h, cells) }""",
        {"cells": np.stack(np.meshgrid(np.arange(4) + 0.5, np.arange(2) + 0.5), -1).reshape(8, 2)},
        ["w"],
    ),
    "a transform by sines is not": (
        """m (float[4,6] x, float[6,6] waves, float[6,2] w) => (float[4,2] y)
        { h = MatMul(x, waves)  y = MatMul(h, w) }""",
        {"waves": np.cos(2 * np.pi * np.outer(np.arange(6), np.arange(6)) / 6)},
        ["w"],
    ),
    "what normalizes the input is not": (
        """m (float[2,3,4,4] x, float[3,1,1] mean, float[3,1,1] std, float[2,3,3,3] w)
        => (float[2,2,2,2] y)
        { c = Sub(x, mean)  n = Div(c, std)  y = Conv(n, w) }""",
        {
            "mean": np.array([0.485, 0.456, 0.406], F32)[:, None, None],
            "std": np.array([0.229, 0.224, 0.225], F32)[:, None, None],
        },
        ["w"],
    ),
    "scales of a Resize are not": (
        """m (float[1,2,3,3] x, float[2,2,1,1] w, float[4] sizes) => (float[1,2,6,6] y)
        { h = Conv(x, w)  y = Resize(h, , sizes) }""",
        {"sizes": np.array([1, 1, 2, 2], F32)},
        ["w"],
    ),
    "what only sizes depend on is not": (
        """m (float[4,3] x, float[3,2] w, float[2,5] other) => (float[4,2] y)
        { h = MatMul(x, w)  s = Shape<start = 0, end = 1>(other)  f = Cast<to = 1>(s)
          y = Add(h, f) }""",
        {"other": np.ones((2, 5), F32) / 3},
        ["w"],
    ),
    "a mask of a window is not": (
        """m (float[2,4,6] x, float[6,4] w, float[4,4] window) => (float[2,4,4] y)
        { h = MatMul(x, w)  a = Add(h, window)  y = Softmax(a) }""",
        {"window": np.where(np.arange(16).reshape(4, 4) % 3, 0, -100).astype(F32)},
        ["w"],
    ),
    "what is joined to each sample is not": (
        """m (float[2,3] x, float[3,3] w, float[2,4] more) => (float[2,7] y)
        { h = MatMul(x, w)  y = Concat<axis = 1>(h, more) }""",
        {"more": DRAW.standard_normal((2, 4)).astype(F32)},
        ["w"],
    ),
    "a factor of what is trained is": (
        """m (int64[4] i, float[7,3] w1, float[3,2] w2) => (float[4,2] y)
        { h = Gather(w1, i)  t = Transpose(w1)  s = MatMul(h, t)  p = Softmax(s)
          v = MatMul(w1, w2)  y = MatMul(p, v) }""",
        {},
        ["w1", "w2"],
    ),
    "a product of weights alone is": (
        """m (float[4,3] x, float[3,2] w1, float[1,2] w2, float[2,2] w3) => (float[4,2] y)
        { h = MatMul(x, w1)  p = MatMul(w2, w3)  y = Add(h, p) }""",
        {},
        ["w1", "w2", "w3"],
    ),
    "integers are not": (
        """m (float[4,3] x, float[3,2] w, int64[4,2] n) => (float[4,2] y)
        { h = MatMul(x, w)  c = Cast<to = 1>(n)  y = Add(h, c) }""",
        {"n": np.arange(8).reshape(4, 2)},
        ["w"],
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_is_found(case: str, tmp_path: Path) -> None:
    text, weights, expected = FOUND[case]
    assert names(read(tmp_path, text, **weights)) == expected


def test_weights_of_gpt2() -> None:
    """Every parameter of the network, the tied embedding once, and no mask."""
    found = find_trained(load(MODELS / "gpt2.dynamo.static.onnx", TRAINING)).trained
    layer = [
        *(f"{n}.{p}" for n in ("ln_1", "ln_2") for p in ("weight", "bias")),
        *(f"attn.{n}.{p}" for n in ("c_attn", "c_proj") for p in ("weight", "bias")),
        *(f"mlp.{n}.{p}" for n in ("c_fc", "c_proj") for p in ("weight", "bias")),
    ]
    expected = {f"transformer.h.{i}.{p}" for i in (0, 1) for p in layer}
    expected |= {"transformer.ln_f.weight", "transformer.ln_f.bias"}
    tables = [t for t in found if t.name not in expected]
    assert expected < {t.name for t in found}
    assert sorted(list(t.tensor.shape) for t in tables) == [[1, 16, 48], [512, 48]]


MLP = """m (float[4,6] x, float[6,5] w1, float[5] w2, float[5,3] w3, float[3] w4) => (float[4,3] y)
{ h = Gemm(x, w1, w2)  r = Relu(h)  y = Gemm(r, w3, w4) }"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"params": ["w3"]}, ["w3"]),
        ({"params": ["w[24]"]}, ["w2", "w4"]),
        ({"params": ["w4", "w1"]}, ["w1", "w4"]),
        ({"frozen": ["w1", "*2"]}, ["w3", "w4"]),
        ({"params": ["w*"], "frozen": ["w1"]}, ["w2", "w3", "w4"]),
    ],
)
def test_what_users_choose(how: dict[str, list[str]], expected: list[str], tmp_path: Path) -> None:
    assert names(read(tmp_path, MLP), **how) == expected


def test_params_may_be_what_is_not_found(tmp_path: Path) -> None:
    """A number, and a mask: whoever names them means them."""
    text = """m (float[4,6] x, float[6,5] w, float[1] c, float[4,5] low) => (float[4,5] y)
    { h = MatMul(x, w)  a = Mul(h, c)  y = Add(a, low) }"""
    weights = {"c": np.array([2], F32), "low": np.full((4, 5), -1e9, F32)}
    assert names(read(tmp_path, text, **weights)) == ["w"]
    assert names(read(tmp_path, text, **weights), params=["c", "low"]) == ["c", "low"]


def test_names_with_brackets_are_taken_as_they_are(tmp_path: Path) -> None:
    path = saved(tmp_path, MLP)
    proto = onnx.load(path)
    for tensor in proto.graph.initializer:
        tensor.name = tensor.name.replace("w3", "layers[3].w")
    for node in proto.graph.node:
        node.input[:] = [n.replace("w3", "layers[3].w") for n in node.input]
    onnx.save(proto, path)
    assert names(load(path, TRAINING), params=["layers[3].w"]) == ["layers[3].w"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"params": ["v*"]}, r"--params v\* matches no weight; there are 'w1', 'w2', 'w3', ..."),
        ({"frozen": ["v"]}, "--frozen v matches no weight; there are 'w1'"),
        ({"frozen": ["w*"]}, "no weight is left to train; name weights with --params"),
    ],
)
def test_globs_that_do_not_fit(how: dict[str, list[str]], message: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=message):
        names(read(tmp_path, MLP), **how)


def test_a_model_without_weights(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="no weight is left to train"):
        names(read(tmp_path, "m (float[2] x) => (float[2] y) { y = Relu(x) }"))


def test_an_op_without_a_gradient_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it lies between a parameter and the loss; frozen, the rest is trained."""
    text = """m (float[4,6] x, float[6,5] w1, float[5,3] w2) => (float[4,3] y)
    { h = MatMul(x, w1)  q, s, z = DynamicQuantizeLinear(h)  d = DequantizeLinear(q, s, z)
      y = MatMul(d, w2) }"""
    path, output = saved(tmp_path, text), tmp_path / "step.onnx"
    arguments = ["grad", str(path), "--loss", "mse", "--optimizer", "sgd", "-o", str(output)]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "DequantizeLinear 'DequantizeLinear_d' has no gradient" in error
    assert "--frozen" in error and "Traceback" not in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]
    assert main([*arguments, "--frozen", "w1"]) == 0
    assert "1 parameters of 15 elements" in capsys.readouterr().out


def test_the_list_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, MLP)
    arguments = ["--loss", "mse", "--optimizer", "adam", "--clip-norm", "1"]
    assert main(["grad", str(path), *arguments, "-o", str(tmp_path / "step.onnx")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["w1", "6x5", "Gemm", "operand", "1"]
    assert "4 parameters of 53 elements, 212 B" in lines
    assert "state of each parameter: exp_avg, exp_avg_sq" in lines
    assert any(line.startswith("a step takes x, target, learning_rate") for line in lines)


def test_what_is_not_trained_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reason, and a warning for each float weight of two dimensions or more."""
    text = """m (float[2,8,6] x, float[6,6] w, float[8,6] sines, float[3] f, float d)
    => (float[2,8,6] y)
    { h = MatMul(x, w)  s = Add(h, sines)  y = Mul(s, d)  unread = Mul(f, f) }"""
    weights = {"sines": sinusoid(8, 6), "f": np.array([1, 2, 4], F32), "d": np.array(0.5, F32)}
    path, output = saved(tmp_path, text, **weights), tmp_path / "step.onnx"
    arguments = ["grad", str(path), "--loss", "mse", "--optimizer", "sgd", "-o", str(output)]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "1 parameters of 36 elements" in out
    assert "1 single number is not trained: d" in out
    assert [line.split() for line in out.splitlines() if line.startswith("sines")] == [
        ["sines", "8x6", "a", "table", "of", "sines", "and", "cosines"]
    ]
    assert err == ("onnxpar: warning: sines (8x6) is not trained: a table of sines and cosines\n")
    assert main([*arguments, "--frozen", "sines"]) == 0
    assert capsys.readouterr().err == ""


def test_the_loss_of_one_output_trains_what_that_depends_on(tmp_path: Path) -> None:
    """As torch, which leaves the gradient of all else None; what is named must get one."""
    text = """m (float[4,6] x, float[6,3] w1, float[3,2] w2, float[3,5] w3)
    => (float[4,2] y, float[4,5] z) { h = MatMul(x, w1)  y = MatMul(h, w2)  z = MatMul(h, w3) }"""
    path, output = saved(tmp_path, text), tmp_path / "step.onnx"
    how = {"loss": "mse", "optimizer": "sgd", "loss_of": "y"}
    with pytest.warns(UserWarning, match=r"w3 \(3x5\) is not trained: the loss does not depend"):
        step = grad(path, output, **how)
    assert [slot.input for slot in step.parameters] == ["w1", "w2"]
    with pytest.raises(StrategyError, match="the loss does not depend on 'w3'"):
        grad(path, output, params=["w3"], **how)


def test_what_no_gradient_reaches_is_not_trained(tmp_path: Path) -> None:
    """A Sign hands on none."""
    text = """m (float[4,6] x, float[6,3] w1, float[6,3] w2) => (float[4,3] y)
    { h = MatMul(x, w1)  s = Sign(h)  g = MatMul(x, w2)  y = Add(s, g) }"""
    with pytest.warns(UserWarning, match=r"w1 \(6x3\) is not trained: no gradient reaches it"):
        step = grad(saved(tmp_path, text), tmp_path / "step.onnx", loss="mse", optimizer="sgd")
    assert [slot.input for slot in step.parameters] == ["w2"]


SIGNATURE = """# inputs
p_w: PARAMETER target='layers.0.w'
p_scale: PARAMETER target='logit_scale'
b_pe: BUFFER target='rate' persistent=True
x: USER_INPUT
"""


@pytest.mark.parametrize(
    ("signed", "producer", "expected"),
    [
        (True, "pytorch", ["layers.0.w", "logit_scale"]),
        (False, "pytorch", ["layers.0.w", "logit_scale", "rate", "onnx::Mul_7"]),
        (False, "", ["layers.0.w", "rate", "onnx::Mul_7"]),
    ],
)
def test_what_the_exporter_says_counts(
    signed: bool, producer: str, expected: list[str], tmp_path: Path
) -> None:
    """torch.export lists the parameters; else a number needs a name, which only torch gives."""
    text = """m (float[4,6] x, float[6,3] w, float s, float[3] r, float[3] m, float c)
    => (float[4,3] y)
    { h = MatMul(x, w)  e = Exp(s)  a = Mul(h, e)  b = Mul(a, r)  d = Mul(b, m)  y = Mul(d, c) }"""
    weights = {name: np.array(DRAW.standard_normal(3), F32) for name in "rm"}
    path = saved(tmp_path, text, s=np.array(2.66, F32), c=np.array(0.3, F32), **weights)
    proto = onnx.load(path)
    names = {"w": "layers.0.w", "s": "logit_scale", "r": "rate", "m": "onnx::Mul_7", "c": "val_3"}
    for tensor in proto.graph.initializer:
        tensor.name = names[tensor.name]
    for node in proto.graph.node:
        node.input[:] = [names.get(n, n) for n in node.input]
    proto.producer_name = producer
    if signed:
        key = "pkg.torch.export.ExportedProgram.graph_signature"
        proto.graph.metadata_props.add(key=key, value=SIGNATURE)
    onnx.save(proto, path)
    assert [t.name for t in find_trained(load(path, TRAINING)).trained] == expected
