"""What the committed models become in many steps of gradient descent: as one, over ranks, and in
PyTorch in float64, which the script that exports them has written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from committed import MODELS
from double_models import write_double
from onnx import numpy_helper
from training.steps import Array, ThreadTrainer

from onnxpar.graph.training_spec import Step
from onnxpar.report.compare import Report, compare_arrays
from onnxpar.report.compare_training import UnsplitStep, judge_gradients
from onnxpar.training import grad

ROWS = 4
"""Of the batch on which a model is trained."""
HUGE = 2.0**40
"""A learning rate at which nothing of a parameter is left in the next one but its gradient."""
DOUBLE = ("gpt2", "llama", "dlrm", "mixtral", "t5")
"""Models of which onnxruntime has kernels in float64 for all ops and their gradients."""


@dataclass(frozen=True)
class Trajectory:
    """Losses before each step, the gradients of the first, and the parameters behind the last."""

    losses: Array
    gradients: Mapping[str, Array]
    parameters: Mapping[str, Array]


@dataclass(frozen=True)
class Expected:
    """A batch, a learning rate, and what PyTorch makes of them: losses, and elements of each
    parameter at flat `places`, the largest of which is as large as `largest` says. `constants` are
    those by which an export at this batch size differs from the committed one."""

    kind: str
    output: str
    batch: dict[str, Array]
    rate: float
    losses: Array
    places: Mapping[str, Array]
    values: Mapping[str, Array]
    largest: Mapping[str, float]
    constants: Mapping[str, Array]


def expected(model: str, rows: int = ROWS) -> Expected:
    """What is written down of a model trained on so many rows of its batch, in float32."""
    few = "" if rows == ROWS else f".batch{rows}"
    with np.load(MODELS / "expected" / f"{model}.legacy.training{few}.npz") as stored:
        told = dict(stored)
    batch = {k.removeprefix("feed."): v for k, v in told.items() if k.startswith("feed.")}
    constants = {k.removeprefix("constant."): v for k, v in told.items() if k.startswith("const")}
    kind = str(told["kind"])
    if kind == "softmax-cross-entropy":
        batch["labels"] = batch.pop("target")
    names = [f"network.{name}" for name in told["names"]]
    return Expected(
        kind,
        str(told["output"]),
        as_type(batch, np.float32),
        float(told["rate"]),
        told["losses"],
        dict(zip(names, told["places"], strict=True)),
        dict(zip(names, told["trained"], strict=True)),
        dict(zip(names, map(float, told["largest"]), strict=True)),
        constants,
    )


def as_type(batch: Mapping[str, Array], dtype: type[np.floating]) -> dict[str, Array]:
    """A batch whose floats are of this type."""
    return {k: v.astype(dtype) if v.dtype.kind == "f" else v for k, v in batch.items()}


def write_descent(model: str, folder: Path, *, double: bool = False, rows: int = ROWS) -> Path:
    """Writes the step of gradient descent of a model, in float32 or float64, on so many rows."""
    source, step = MODELS / f"{model}.legacy.training.onnx", folder / f"{model}.{double}.onnx"
    how = expected(model, rows)
    if rows != ROWS:
        write_few(source, folder / "few.onnx", rows, how.constants)
        source = folder / "few.onnx"
    if double:
        write_double(source, folder / "double.onnx")
        source = folder / "double.onnx"
    grad(source, step, loss=how.kind, loss_of=how.output, optimizer="sgd")
    return step


def write_few(source: Path, path: Path, rows: int, constants: Mapping[str, Array]) -> None:
    """Writes the model as its exporter writes it at a batch of so many rows."""
    model = onnx.load(source)
    for port in (*model.graph.input, *model.graph.output):
        port.type.tensor_type.shape.dim[0].dim_value = rows
    del model.graph.value_info[:]
    for node in model.graph.node:
        if node.output[0] in constants:
            node.attribute[0].t.CopyFrom(numpy_helper.from_array(constants[node.output[0]]))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def descend_unsplit(
    step: Path, spec: Step, batch: Mapping[str, Array], rate: float, steps: int
) -> Trajectory:
    """What a stock onnxruntime makes of it."""
    once = UnsplitStep(step, spec)
    once.step(batch, HUGE)
    many = UnsplitStep(step, spec)
    losses = [many.step(batch, rate, seed) for seed in range(steps)]
    parameters = {slot.input: many.states[slot.input] for slot in spec.parameters}
    return Trajectory(np.array(losses), gradients_of(once.states, parameters), parameters)


def descend(par: Path, batch: Mapping[str, Array], rate: float, steps: int) -> Trajectory:
    """What ranks make of it."""
    with ThreadTrainer(par) as trainer:
        names = [slot.input for slot in trainer.spec.parameters]
        states = trainer.session.states
        trainer.step(batch, HUGE)
        far = {name: states.read(name) for name in names}
        states.reset()
        losses = [trainer.step(batch, rate, seed)["loss"] for seed in range(steps)]
        parameters = {name: states.read(name) for name in names}
    return Trajectory(np.array(losses), gradients_of(far, parameters), parameters)


def gradients_of(far: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
    """The gradients of parameters, given what one huge step makes of them."""
    return {name: far[name] / -far[name].dtype.type(HUGE) for name in names}


def loss_error(given: Array, wanted: Array) -> float:
    """The largest error of a loss, relative to it."""
    return _worst(np.abs(given - wanted[: len(given)]) / np.abs(wanted[: len(given)]))


def parameter_error(given: Mapping[str, Array], wanted: Mapping[str, Array]) -> float:
    """The largest error of a parameter, relative to its largest element."""
    return _worst([np.abs(given[n] - v).max() / np.abs(v).max() for n, v in wanted.items()])


def gradient_error(given: Mapping[str, Array], wanted: Mapping[str, Array]) -> float:
    """The largest error of a gradient, as `onnxpar check` measures it."""
    rows = [compare_arrays(f"{name}.grad", given[name], value) for name, value in wanted.items()]
    report = judge_gradients(Report(tuple(rows)), Step(gradients=dict.fromkeys(wanted, "")))
    assert not any(row.fault for row in report.rows)
    return _worst([row.error for row in report.rows])


def torch_error(given: Trajectory, told: Expected) -> float:
    """The largest error, of losses and behind the last step of parameters, against what PyTorch has
    in float64."""
    errors = [loss_error(given.losses, told.losses)]
    if len(given.losses) == len(told.losses):
        for name, at in told.places.items():
            error = given.parameters[name].ravel()[at] - told.values[name]
            errors.append(float(np.abs(error).max()) / told.largest[name])
    return _worst(errors)


def _worst(errors: Sequence[float] | Array) -> float:
    """Of which NaN is the worst."""
    return float(np.max(errors))
