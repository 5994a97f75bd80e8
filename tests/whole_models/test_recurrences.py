"""Recurrent networks whose hidden units are split, on real ranks: every step gathers the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import check_agrees, check_outputs, options, run_ranks, run_unsplit
from onnx import numpy_helper
from small_models import write_text
from training.steps import check_training, write_step

from onnxpar.compiler.plan import Plan
from onnxpar.planner import sharder
from onnxpar.training import grad

HEAD = '<ir_version: 10, opset_import: ["" : 18]>\n'
SCALE = np.float32(0.2)
"""What random weights are multiplied by: large ones would make the steps chaotic."""


def write(text: str, path: Path) -> Path:
    """Saves a model from its text; inputs of which the name starts with `w` become weights."""
    model = onnx.load(write_text(HEAD + text, path))
    for weight in model.graph.initializer:
        if weight.name.startswith("w"):
            value = np.asarray(numpy_helper.to_array(weight) * SCALE, np.float32)
            weight.CopyFrom(numpy_helper.from_array(value, weight.name))
    onnx.save(model, path)
    return path


@dataclass(frozen=True)
class Split:
    """A model, how it is split, and the collectives that this takes."""

    text: str
    mesh: str
    shard: Mapping[str, Any]
    collectives: str


UNITS = {"Relu_y": [[None, None, None, "tp"]]}
MODELS = {
    "units": Split(
        """m (float[3,4,5] x, float[1,28,5] w1, float[1,28,7] w2, float[1,56] w3, float[1,4,7] s,
        float[1,4,7] t, float[1,21] w4) => (float[3,1,4,7] y, float[1,4,7] a, float[1,4,7] c)
        <int32[4] n = {3, 1, 0, 2}>
        { h, a, c = LSTM<hidden_size = 7, clip = 0.9>(x, w1, w2, w3, n, s, t, w4)  y = Relu(h) }""",
        "tp=3",
        UNITS,
        "AllGather",
    ),
    "a batch, and units by hand": Split(
        """m (float[3,5,5] x, float[2,21,5] w1, float[2,21,7] w2, float[2,42] w3)
        => (float[3,2,5,7] y, float[2,5,7] a)
        { h, a = GRU<hidden_size = 7, direction = "bidirectional">(x, w1, w2, w3)  y = Relu(h) }""",
        "dp=2,tp=2",
        {"Relu_y": [[None, None, "dp", {"tp": [2, 5]}]]},
        "AllGather AllGather",
    ),
    "directions and units": Split(
        """m (float[3,4,5] x, float[2,15,5] w1, float[2,15,5] w2, float[2,30] w3)
        => (float[3,2,4,5] y) <int32[4] n = {3, 1, 0, 2}>
        { h = GRU<hidden_size = 5, direction = "bidirectional", linear_before_reset = 1,
          activations = ["Sigmoid", "Tanh", "HardSigmoid", "Softsign"]>(x, w1, w2, w3, n)
          y = Relu(h) }""",
        "a=2,tp=2",
        {"Relu_y": [[None, "a", None, "tp"]]},
        "AllGather",
    ),
    "heads of units": Split(
        """m (float[3,4,5] x, float[1,12,5] w1, float[1,12,12] w2) => (float[3,1,4,4,3] y)
        <int64[5] shape = {3, 1, 4, 4, 3}>
        { h = RNN<hidden_size = 12>(x, w1, w2)  r = Reshape(h, shape)  y = Relu(r) }""",
        "tp=3",
        {"Relu_y": [[None, None, None, None, "tp"]]},
        "AllGather",
    ),
    "in a branch": Split(
        """m (float[3,4,5] x, bool on, float[1,24,5] w1, float[1,24,6] w2, float[3,1,4,6] z)
        => (float[3,1,4,6] y, float[3,1,4,6] u) {
          h = If(on) <
            then_branch = one () => (float[3,1,4,6] p) { p = LSTM<hidden_size = 6>(x, w1, w2) },
            else_branch = two () => (float[3,1,4,6] q) { q = Neg(z) }>
          y = Relu(h)
          l = LSTM<hidden_size = 6, direction = "reverse">(x, w1, w2)  u = Tanh(l) }""",
        "tp=2",
        {**UNITS, "Tanh_u": [[None, None, None, "tp"]]},
        "AllGather AllGather",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_units_are_split(name: str, tmp_path: Path) -> None:
    split = MODELS[name]
    model = write(split.text, tmp_path / "model.onnx")
    plan = check_agrees(model, tmp_path, options(split.mesh, strategy={"shard": split.shard}))
    assert kinds(plan) == split.collectives.split()


def test_what_all_steps_send_is_counted(tmp_path: Path) -> None:
    split = MODELS["heads of units"]
    model = write(split.text, tmp_path / "model.onnx")
    plan, _ = sharder.plan(model, options(split.mesh, strategy={"shard": split.shard}))
    steps, batch, units = 3, 4, 12
    assert plan.collectives[0].bytes == steps * (batch * units * 4 * 2 // 3)


def kinds(plan: Plan) -> list[str]:
    """The kinds of a plan's collectives, in alphabetical order."""
    return sorted(c.kind for c in plan.collectives)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_batches_that_come_first(op: str, tmp_path: Path) -> None:
    """onnxruntime has no such kernels, but for steps that come first."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op] * 5
    ports = f"float[4,3,6] x, float[2,{gates},6] w1, float[2,{gates},5] w2, float[2,{2 * gates}] w3"
    own = f"""m ({ports}, float[4,2,5] s) => (float[4,3,2,5] y, float[4,2,5] a)
    {{ h, a = {op}<hidden_size = 5, direction = "bidirectional", layout = 1>(x, w1, w2, w3, , s)
       y = Relu(h) }}"""
    other = f"""m ({ports}, float[4,2,5] s) => (float[4,3,2,5] y, float[4,2,5] a)
    {{ t = Transpose<perm = [1, 0, 2]>(x)  u = Transpose<perm = [1, 0, 2]>(s)
       h, e = {op}<hidden_size = 5, direction = "bidirectional">(t, w1, w2, w3, , u)
       z = Transpose<perm = [2, 0, 1, 3]>(h)  y = Relu(z)  a = Transpose<perm = [1, 0, 2]>(e) }}"""
    plan = sharder.shard(
        write(own, tmp_path / "own.onnx"),
        tmp_path / "own.par",
        options("dp=2,tp=2", strategy={"shard": {"Relu_y": [["dp", None, None, "tp"]]}}),
    )
    rng = np.random.default_rng(3)
    feeds = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in (("x", (4, 3, 6)), ("s", (4, 2, 5)))
    }
    wanted = run_unsplit(write(other, tmp_path / "other.onnx"), feeds)
    check_outputs(run_ranks(tmp_path / "own.par", feeds), wanted, [p.name for p in plan.outputs])


def test_steps_and_batches_may_stay_open(tmp_path: Path) -> None:
    text = """m (float[n,b,5] x, float[2,15,5] w1, float[2,15,5] w2) => (float[n,2,b,5] y)
    { h = GRU<hidden_size = 5, direction = "bidirectional">(x, w1, w2)  y = Relu(h) }"""
    model = write(text, tmp_path / "model.onnx")
    par = tmp_path / "model.par"
    plan = sharder.shard(model, par, options("tp=2", strategy={"shard": UNITS}))
    assert kinds(plan) == ["AllGather", "AllGather"]
    for steps, batch in ((1, 3), (6, 2)):
        x = np.random.default_rng(steps).standard_normal((steps, batch, 5)).astype(np.float32)
        check_outputs(run_ranks(par, {"x": x}), run_unsplit(model, {"x": x}), ["y"])


def classifier(op: str, steps: int, units: int, direction: str = "forward") -> str:
    """A recurrent layer of as many inputs as units, and what is made of all its states."""
    gates, ways = {"LSTM": 4, "GRU": 3}[op] * units, 1 + (direction == "bidirectional")
    return f"""m (float[{steps},4,{units}] x, float[{ways},{gates},{units}] w1,
    float[{ways},{gates},{units}] w2, float[{ways},{2 * gates}] w3, float[{units},10] w4)
    => (float[4,10] y) <int64[2] sums = {{0, 1}}>
    {{ h = {op}<hidden_size = {units}, direction = "{direction}">(x, w1, w2, w3)
       f = ReduceMean<keepdims = 0>(h, sums)  y = MatMul(f, w4) }}"""


PRESETS = {
    "large weights": (("LSTM", 4, 192), "tensor-parallel 2", "AllGather AllReduce"),
    "uneven parts": (("GRU", 4, 193), "tensor-parallel 3", "AllGather AllGather AllReduce"),
    "two directions": (("LSTM", 4, 128, "bidirectional"), "tensor-parallel 2", "AllReduce"),
    "many steps": (("LSTM", 32, 24), "tensor-parallel 2", "AllGather AllGather"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_tensor_parallel(name: str, tmp_path: Path) -> None:
    """Units are split where steps that talk cost less than weights that are gathered, or both
    directions where there are two."""
    text, layout, wanted = PRESETS[name]
    plan = check_agrees(write(classifier(*text), tmp_path / "m.onnx"), tmp_path, options(layout))
    assert kinds(plan) == wanted.split()
    inner = [c.tensor for c in plan.collectives if c.tensor.startswith("in ")]
    assert bool(inner) == (name in ("large weights", "uneven parts"))
    assert all("tp" in w.layout_text for w in plan.weights if w.name in ("w1", "w2"))


TRAINED = """m (float[4,3,5] x, float[2,28,5] w1, float[2,28,7] w2, float[2,56] w3,
float[1,15,14] w4, float[1,15,5] w5, float[1,30] w6, float[5,3] w7) => (float[4,3] y)
<int64[3] shape = {3, 4, 14}, int64[1] zero = {0}>
{ t = Transpose<perm = [1, 0, 2]>(x)
  h = LSTM<hidden_size = 7, direction = "bidirectional">(t, w1, w2, w3)
  u = Transpose<perm = [0, 2, 1, 3]>(h)  v = Reshape(u, shape)
  o, a = GRU<hidden_size = 5>(v, w4, w5, w6)  f = Squeeze(a, zero)  y = MatMul(f, w7) }"""


@pytest.mark.matrix(2)
@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2,tp=2"])
def test_training_with_split_units(mesh: str, tmp_path: Path) -> None:
    rows = [[None, "dp" if "dp" in mesh else None, None], [None, "tp", None]]
    step = write_step(HEAD + TRAINED, tmp_path)
    shard = {"LSTM_h": rows, "GRU_o": rows}
    plan = check_training(step, mesh, 4, strategy={"shard": shard})
    inner = [c.tensor for c in plan.collectives if c.tensor in ("in LSTM_h", "in GRU_o")]
    assert inner == ["in LSTM_h", "in GRU_o", "in GRU_o"]


@pytest.mark.parametrize("layout", ["tensor-parallel 2", "hybrid dp=2,tp=2"])
def test_training_under_presets(layout: str, tmp_path: Path) -> None:
    text = classifier("LSTM", 2, 128)
    model = write(text, tmp_path / "scaled.onnx")
    step = tmp_path / "step.onnx"
    grad(model, step, loss="softmax-cross-entropy", optimizer="sgd")
    plan = check_training(step, layout, 3)
    assert any(c.tensor == "in LSTM_h" for c in plan.collectives)
