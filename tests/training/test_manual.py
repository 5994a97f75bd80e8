"""Training of programs per rank: as that of the global model of the same function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper
from training.steps import Array, ThreadTrainer, run_unsplit

from onnxpar import cli, pipeline
from onnxpar.errors import OnnxparError, StrategyError
from onnxpar.mesh import Mesh
from onnxpar.pipeline import Options
from onnxpar.step import Step
from onnxpar.strategy import Strategy
from onnxpar.training import grad

STEPS, RATE = 20, 0.05
TOLERANCE = {"double": 1e-9, "float": 1e-5}
HEAD = '<ir_version: 8, opset_import: ["" : 17, "onnxpar" : 1]>\n'
WEIGHTS = {"w1": (6, 16), "b1": (16,), "w2": (16, 5), "b2": (5,)}

GLOBAL = """mlp (T[16,6] x, T[6,16] w1, T[16] b1, T[16,5] w2, T[5] b2) => (T[16,5] y)
{ h = MatMul(x, w1)  a = Add(h, b1)  t = Tanh(a)  o = MatMul(t, w2)  y = Add(o, b2) }"""

SLICES = """slices (T[16,6] x, T[6,16] w1, T[16] b1, T[16,5] w2, T[5] b2) => (T[16,5] y) {
  rank = onnxpar.Rank ()
  ranks = onnxpar.GroupSize ()
  sizes = Shape (w1)
  one = Constant <value_ints = [1]> ()
  none = Constant <value_ints = [0]> ()
  hidden = Gather (sizes, one)
  shard = Div (hidden, ranks)
  begin = Mul (rank, shard)
  end = Add (begin, shard)
  columns = Slice (w1, begin, end, one)
  own = Slice (b1, begin, end, none)
  rows = Slice (w2, begin, end, none)
  h = MatMul (x, columns)  a = Add (h, own)  t = Tanh (a)
  part = MatMul (t, rows)
  o = onnxpar.AllReduce (part)
  y = Add (o, b2)
}"""

COPIES = GLOBAL.replace("T[16,6] x", "T[2,6] x").replace("T[16,5] y", "T[2,5] y")

DEALT = """dealt (T[B,6] x, T[6,16] w1, T[16] b1, T[16,5] w2, T[5] b2) => (T[B,5] y) {
  h = MatMul (x, w1)  a = Add (h, b1)  t = Tanh (a)
  part = MatMul (t, w2)
  o = onnxpar.AllReduce <axes = ["tp"]> (part)
  y = Add (o, b2)
}"""
COLUMNS = {"w1": [None, "tp"], "b1": ["tp"], "w2": ["tp", None]}


@dataclass(frozen=True)
class Case:
    """A program per rank that computes what GLOBAL does."""

    text: str
    mesh: str
    tensors: Mapping[str, Any] = field(default_factory=dict)


BATCH = {name: ["dp", None] for name in ("x", "target")}
CASES = {
    "slices": Case(SLICES, "ranks=8"),
    "copies": Case(COPIES, "dp=8", BATCH),
    "dealt": Case(DEALT.replace("B", "16"), "tp=8", COLUMNS),
    "both": Case(DEALT.replace("B", "8"), "dp=2,tp=4", {**BATCH, **COLUMNS}),
}


def write(folder: Path, name: str, text: str, dtype: str, **weights: Array) -> Path:
    """Saves a model; inputs in WEIGHTS have values that depend on their names alone."""
    model = onnx.parser.parse_model(HEAD + text.replace("T[", f"{dtype}["))
    for port in list(model.graph.input):
        shape = WEIGHTS.get(port.name)
        if shape is not None:
            value = np.random.default_rng(len(port.name) + shape[0]).standard_normal(shape) / 2
            value = weights.get(port.name, value)
            array = value.astype(np.float64 if dtype == "double" else np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, port.name))
            model.graph.input.remove(port)
    onnx.save(model, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


def batches(dtype: str, count: int = STEPS) -> list[dict[str, Array]]:
    draw = np.random.default_rng(3)
    element = np.float64 if dtype == "double" else np.float32
    return [
        {"x": draw.standard_normal((16, 6)), "target": draw.standard_normal((16, 5))}
        for _ in range(count)
    ] and [
        {name: array.astype(element) for name, array in batch.items()}
        for batch in (
            {"x": draw.standard_normal((16, 6)), "target": draw.standard_normal((16, 5))}
            for _ in range(count)
        )
    ]


def shard(folder: Path, case: Case, dtype: str = "double", **how: Any) -> Path:
    """Writes and shards the step of a program per rank."""
    strategy = {"tensors": case.tensors}
    step = folder / "manual.step.onnx"
    given = {"loss": "mse", "optimizer": "sgd", **how}
    model = write(folder, "manual", case.text, dtype)
    grad(model, step, preset="manual", mesh=case.mesh, strategy=strategy, **given)
    pipeline.shard(step, folder / "step.par", Options(preset="manual", verify=True))
    return folder / "step.par"


def check(folder: Path, case: Case, dtype: str = "double", **how: Any) -> Step:
    """An AssertionError where ranks do not train as the global model does."""
    given = {"loss": "mse", "optimizer": "sgd", **how}
    step = folder / "global.step.onnx"
    grad(write(folder, "global", GLOBAL, dtype), step, **given)
    told, spec = run_unsplit(step, batches(dtype), [RATE] * STEPS)
    tolerance = TOLERANCE[dtype]
    with ThreadTrainer(shard(folder, case, dtype, **how)) as trainer:
        for batch, wanted in zip(batches(dtype), told, strict=True):
            found = trainer.step(batch, RATE)
            for name in (spec.loss, *spec.metrics):
                np.testing.assert_allclose(found[name], wanted[name], rtol=tolerance, err_msg=name)
        for slot in spec.slots:
            state, wanted = trainer.session.states.read(slot.input), told[-1][slot.output]
            scale = float(np.abs(wanted).max()) or 1.0
            np.testing.assert_allclose(
                state, wanted, rtol=0, atol=tolerance * scale, err_msg=slot.input
            )
        for name, wanted in told[-1].items():
            if name.startswith("evaluation"):
                assert name in {p.name for p in trainer.session.get_outputs()}
    return trainer.spec


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps(case: str, dtype: str, tmp_path: Path) -> None:
    check(tmp_path, CASES[case], dtype, optimizer="momentum", clip_norm=0.5)
