"""Compares a sharded training step with the unsplit one over many steps (`check --train`)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.graph.training_spec import GRADIENT, RESIDUAL, Step
from onnxpar.report.compare import Comparison, Report
from onnxpar.report.unsplit import open_unsplit
from onnxpar.runtime.session.tensors import dtype_of
from onnxpar.trainer.trainer import Trainer

FIRST = "loss, first step"
EARLY = 10
"""In so many first steps, losses must agree more closely than later."""
CLOSE: Mapping[str, tuple[float, float]] = {
    "float64": (1e-9, 1e-9),
    "float32": (1e-5, 1e-3),
    "float16": (5e-3, 5e-2),
    "bfloat16": (2e-2, 1e-1),
}
"""Largest allowed relative difference of losses (in early steps, in later steps), by dtype."""


def compare_training(
    model: str | os.PathLike[str],
    trainer: Trainer,
    batches: Iterable[Mapping[str, Array]],
    rate: float,
) -> Report:
    """Takes the same steps with the sharded and the unsplit model, from the same first values;
    compares the loss of each step, and the final parameters and states. Parameters have a tolerance
    only in float64: in less precise dtypes, they diverge where gradients are nearly zero.

    batches  the inputs of each step
    rate     the learning rate

    Errors: ModelError if the unsplit step does not load; RankError.
    """
    spec = trainer.spec.unsplit
    whole = UnsplitStep(model, spec)
    losses: list[tuple[float, float]] = []
    for seed, batch in enumerate(batches):
        loss = trainer.step(batch, rate, seed)[trainer.spec.loss]
        losses.append((loss, whole.step(batch, rate, seed)))
    dtype = trainer.bundle.outputs[trainer.spec.loss].dtype.name
    early, late = CLOSE.get(trainer.spec.precision or dtype, CLOSE["float32"])
    rows = [_losses("loss, first steps", losses[:EARLY], dtype, early)]
    if losses[EARLY:]:
        rows.append(_losses("loss, later steps", losses[EARLY:], dtype, late))
    if spec.compression:
        rows.insert(0, _losses(FIRST, losses[:1], dtype, early))
    for slot in spec.slots:
        state = trainer.session.states.read(slot.input)
        row = _state(slot.input, state, whole.states[slot.input])
        rows.append(replace(row, tolerance=math.inf) if trainer.spec.precision else row)
    return judge_compressed(Report(tuple(rows)), spec)


def judge_gradients(report: Report, step: Step) -> Report:
    """Returns the report with errors of gradients relative to the largest element of the gradient,
    or to a thousandth of the largest element of all gradients if that is more. A gradient below the
    rounding error of that largest element (such as of the bias of attention's keys) may differ by
    this rounding error."""
    names = {f"{name}{GRADIENT}" for name in step.gradients}
    gradients = [row for row in report.rows if row.name in names]
    most = max((row.largest for row in gradients), default=0.0)
    judged = {
        row.name: _gradient(row, most) for row in gradients if row.tolerance and not row.fault
    }
    return Report(tuple(judged.get(row.name, row) for row in report.rows))


def _gradient(row: Comparison, most: float) -> Comparison:
    rounding = float(np.spacing(np.ones((), row.dtype))) * most
    least = rounding / row.tolerance if row.largest < rounding else 0.0
    scale = max(row.largest, most / 1000, least)
    return replace(row, error=row.off / scale) if scale else row


def judge_compressed(report: Report, step: Step) -> Report:
    """Returns the report; if gradients are compressed, without limits on errors of values after the
    first update, and without the ranks' residuals."""
    if not step.compression:
        return report
    judged = (step.loss, FIRST, *step.evaluation)
    kept = {s.output for s in step.slots if s.kind == RESIDUAL}
    rows = [row for row in report.rows if row.name not in kept]
    return Report(
        tuple(row if row.name in judged else replace(row, tolerance=math.inf) for row in rows)
    )


class UnsplitStep:
    """The unsplit training step in an onnxruntime session, which keeps `states` from step to
    step."""

    def __init__(self, model: str | os.PathLike[str], spec: Step) -> None:
        self._session = open_unsplit(model)
        self._spec = spec
        ports = {p.name: p for p in self._session.get_inputs()}
        self._types = {name: dtype_of(port.type) for name, port in ports.items()}
        self.states: dict[str, Array] = {
            slot.input: np.zeros(ports[slot.input].shape, self._types[slot.input])
            for slot in spec.slots
            if not slot.default
        }

    def step(self, batch: Mapping[str, Array], rate: float, seed: int = 0) -> float:
        """Takes one step on a batch, and returns the loss."""
        spec = self._spec
        names = [spec.loss, *(slot.output for slot in spec.slots)]
        rate_ = np.asarray(rate, self._types[spec.rate])
        feeds = {**batch, **self.states, spec.rate: rate_}
        if spec.seed is not None:
            feeds[spec.seed] = np.asarray(seed, np.int64)
        results = self._session.run(names, feeds)
        self.states = dict(zip([slot.input for slot in spec.slots], results[1:], strict=True))
        return float(results[0])


def _losses(
    name: str, losses: list[tuple[float, float]], dtype: str, tolerance: float
) -> Comparison:
    errors = [abs(a - b) / max(abs(b), 1e-300) for a, b in losses]
    worst = float(np.max(errors))  # NaN if any error is NaN
    fault = "" if math.isfinite(worst) else "a loss is not finite"
    return Comparison(name, dtype, (len(losses),), worst, tolerance, fault)


def _state(name: str, given: Array, expected: Array) -> Comparison:
    dtype = expected.dtype.name
    scale = float(np.abs(expected).max(initial=0)) if expected.size else 0.0
    off = float(np.abs(given - expected).max(initial=0))
    error = off / (scale or 1.0)
    tolerance = CLOSE[dtype][1] if dtype == "float64" else math.inf
    if np.issubdtype(expected.dtype, np.integer):
        tolerance = 0.0
    fault = "" if math.isfinite(error) else "it is not finite"
    return Comparison(name, dtype, expected.shape, error, tolerance, fault, off, scale)
