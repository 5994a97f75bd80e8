"""Training steps of small models: written, sharded, and run on threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from agreement import options
from small_models import HEAD, write_text

from onnxpar.compiler.plan import Plan
from onnxpar.graph.training_spec import Step
from onnxpar.planner import sharder
from onnxpar.report.compare_training import compare_training
from onnxpar.runtime.session.feeds import make_feeds
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.trainer.checkpoint import checkpoints
from onnxpar.trainer.trainer import Trainer
from onnxpar.training import grad

Array = npt.NDArray[Any]

MLP = """mlp (float[8,6] x, float[6,9] w1, float[9] w2, float[9,5] w3, float[5] w4)
=> (float[8,5] y) { h = Gemm(x, w1, w2)  r = Relu(h)  y = Gemm(r, w3, w4) }"""
DOUBLE = MLP.replace("float[", "double[")
LINEAR = "linear (float[4,3] x, float[3,2] w) => (float[4,2] y) { y = MatMul(x, w) }"
CROSS_ENTROPY = "softmax-cross-entropy"


class ThreadTrainer(Trainer):
    """A trainer whose ranks are threads of this process."""

    def __init__(self, par: Path) -> None:
        with patch("onnxpar.trainer.trainer.InferenceSession", ThreadSession):
            super().__init__(par)


def states(trainer: Trainer) -> dict[str, Array]:
    """All that a trainer keeps, whole."""
    return {name: trainer.session.states.read(name) for name in trainer.bundle.states}


def same(a: Mapping[str, Array], b: Mapping[str, Array]) -> None:
    """Asserts that these are the same to the bit."""
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def newest(folder: Path) -> Path | None:
    """The checkpoint of the most steps in a folder, whole or not."""
    return next(reversed(checkpoints(folder).values()), None)


def write_model(text: str, folder: Path) -> Path:
    """Saves a model from its text; inputs of which the name starts with `w` become weights."""
    return write_text(text if text.startswith("<") else HEAD + text, folder / "model.onnx")


def write_step(
    text: str, folder: Path, loss: str = CROSS_ENTROPY, optimizer: Any = "sgd", **how: Any
) -> Path:
    """Saves a model and its training step; returns the step's path."""
    grad(write_model(text, folder), folder / "step.onnx", loss=loss, optimizer=optimizer, **how)
    return folder / "step.onnx"


def shard(step: Path, layout: str, **how: Any) -> tuple[Path, Plan]:
    """Shards a step: `zero1 4`, `hybrid dp=2,tp=2`, or a mesh alone; returns the folder."""
    par = step.with_name(f"{layout.replace(' ', '_')}.par")
    return par, sharder.shard(step, par, options(layout, **how))


def plan_of(step: Path, layout: str, **how: Any) -> Plan:
    """What `shard` would do."""
    return sharder.plan(step, options(layout, **how))[0]


def batches(plan: Plan, count: int) -> Iterator[dict[str, Array]]:
    """Random batches for a sharded step."""
    assert plan.step is not None
    ports = {p.name: p for p in plan.inputs}
    specs = [(n, ports[n].dtype or "", ports[n].shape or ()) for n in plan.step.data]
    ranges = {n: r for n, r in plan.ranges.items() if n in plan.step.data}
    for number in range(count):
        yield make_feeds(specs, ranges, number)


def check_training(step: Path, layout: str, steps: int, rate: float = 0.05, **how: Any) -> Plan:
    """An AssertionError where ranks train to something else than one does."""
    par, plan = shard(step, layout, **how)
    with ThreadTrainer(par) as trainer:
        report = compare_training(step, trainer, list(batches(plan, steps)), rate)
    assert report.ok, f"{layout}\n{report.text()}"
    return plan


def run_unsplit(
    step: Path, feeds: Sequence[dict[str, Array]], rates: Sequence[float]
) -> tuple[list[dict[str, Array]], Step]:
    """What a stock onnxruntime makes of a step, over and over: all outputs of each."""
    import onnx

    found = Step.of(onnx.load(step, load_external_data=False))
    assert found is not None
    session = ort.InferenceSession(str(step), quiet(), ["CPUExecutionProvider"])
    ports = {p.name: p for p in session.get_inputs()}
    types = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
    states = {
        s.input: np.zeros(ports[s.input].shape, types[ports[s.input].type])
        for s in found.slots
        if not s.default
    }
    names = [p.name for p in session.get_outputs()]
    told = []
    for batch, rate in zip(feeds, rates, strict=True):
        given = dict(batch) | states
        if found.rate in ports:
            given[found.rate] = np.array(rate, types[ports[found.rate].type])
        told.append(dict(zip(names, session.run(names, given), strict=True)))
        states = {s.input: told[-1][s.output] for s in found.slots}
    return told, found


def quiet() -> ort.SessionOptions:
    """One thread, and no warnings: an initializer may be an input."""
    made = ort.SessionOptions()
    made.intra_op_num_threads = 1
    made.log_severity_level = 3
    return made
