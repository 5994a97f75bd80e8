"""Checks the gradients of a training step against differences of its loss (`check --train`).

The sharded step has the gradients of the unsplit one, even if these are wrong. Here the loss itself
checks them: over a short way along a random direction, the loss must change by the gradient's
component in that direction.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import onnx

from onnxpar.base.arrays import Array
from onnxpar.graph.stop_gradient import marks_stop
from onnxpar.graph.stored import nodes_of, read_stored
from onnxpar.graph.training_spec import SCALE, Step
from onnxpar.load.read_file import read_proto
from onnxpar.report.compare import Comparison
from onnxpar.report.unsplit import open_unsplit
from onnxpar.runtime.session.tensors import dtype_of

TITLE = "gradients, by differences"
TOLERANCE = 0.1
"""Largest allowed error of a predicted change of the loss, as a fraction of the change."""
SECONDS = 10.0
"""No further parameter is tried after this time."""
_WAYS = tuple(2.0**-n for n in range(2, 17, 2))
"""Lengths of the ways to try along a direction, as fractions of a parameter's root mean square."""
_SIGNAL = 300
"""A change of the loss counts only if it is this many times the loss's rounding error."""
_DIRECTIONS = 7


def compare_gradients(
    model: str | os.PathLike[str],
    spec: Step,
    batch: Mapping[str, Array],
    seconds: float = SECONDS,
    seed: int = 0,
) -> tuple[list[Comparison], str]:
    """Returns a list with the worst error over all parameters (empty if none could be compared);
    and a sentence, if some are left out.

    spec     the roles of the step's inputs and outputs
    seconds  time after which no further parameter is tried; the order is random

    A parameter is left out if rounding hides the changes, or if slopes do not settle as ways become
    shorter, as at a step of the loss.
    """
    end = time.monotonic() + seconds
    slopes = _Slopes(Path(model), spec, batch, end)
    if slopes.obstacle:
        return [], f"no gradient is compared with differences of the loss: {slopes.obstacle}"
    random = np.random.default_rng(seed)
    errors: dict[str, float] = {}
    for name in random.permutation(sorted(slopes.gradients)):
        error = slopes.error(str(name), random)
        if error is not None:
            errors[str(name)] = error
        if slopes.is_late:
            break
    few = f"{len(errors)} of {len(slopes.gradients)} gradients are compared with differences"
    sentence = f"{few} of the loss" if len(errors) < len(slopes.gradients) else ""
    if not errors:
        return [], sentence
    worst = max(errors, key=lambda name: errors[name])
    is_wrong = not errors[worst] <= TOLERANCE
    fault = f"the loss does not change as the gradient of {worst!r} says" if is_wrong else ""
    row = Comparison(TITLE, slopes.dtype.name, (len(errors),), errors[worst], TOLERANCE, fault)
    return [row], sentence


@dataclass(frozen=True)
class _Change:
    """The change of the loss over a way of length `way` along a direction: as measured (`found`),
    and as the gradient predicts it (`said`)."""

    way: float
    found: float
    said: float

    def distance(self, other: _Change) -> float:
        """Returns the relative difference between the measured slopes over this way and another."""
        a, b = self.found / self.way, other.found / other.way
        return abs(a - b) / (max(abs(a), abs(b)) or 1.0)

    @property
    def error(self) -> float:
        """The error of the predicted change, as a fraction of the larger one of both changes."""
        return abs(self.found - self.said) / max(abs(self.found), abs(self.said))


class _Slopes:
    """The unsplit step on one batch, at the first values of the parameters. `obstacle` says why
    differences cannot check its gradients; empty if they can. Nothing is tried after the time
    `end`."""

    def __init__(self, model: Path, spec: Step, batch: Mapping[str, Array], end: float) -> None:
        proto = read_proto(model)
        self._end, self._folder = end, model.parent
        self.obstacle = ""
        if spec.precision is not None:
            self.obstacle = f"the loss is computed in {spec.precision}"
        elif any(marks_stop(node) for node in nodes_of(proto.graph)):
            self.obstacle = "gradients are stopped on the way"
        elif not spec.gradients:
            self.obstacle = "no parameter has a gradient of its own"
        if self.obstacle:
            return
        for name in spec.gradients.values():
            proto.graph.output.append(onnx.ValueInfoProto(name=name))
        self._session = open_unsplit(proto.SerializeToString(), model.parent)
        fed, overridden = self._session.get_inputs(), self._session.get_overridable_initializers()
        types = {port.name: dtype_of(port.type) for port in (*fed, *overridden)}
        zeros = {port.name: np.zeros(port.shape, types[port.name]) for port in fed}
        zero_states = {s.input: zeros[s.input] for s in spec.slots if not s.default}
        self._feeds = {**batch, **zero_states, spec.rate: zeros[spec.rate]}
        if spec.seed is not None:
            self._feeds[spec.seed] = np.zeros((), np.int64)
        if SCALE in types:
            self._feeds[SCALE] = np.ones((), types[SCALE])
        self._loss, self._scale = spec.loss, spec.gradient_scale
        self._stored = {t.name: t for t in proto.graph.initializer if t.name in spec.gradients}
        results = self._session.run([spec.loss, *spec.gradients.values()], self._feeds)
        self.dtype = np.asarray(results[0]).dtype
        self._noise = float(np.spacing(np.abs(results[0])))
        self.gradients = dict(zip(spec.gradients, results[1:], strict=True))

    @property
    def is_late(self) -> bool:
        """True if the time is over."""
        return time.monotonic() > self._end

    def error(self, name: str, random: np.random.Generator) -> float | None:
        """Returns the error of a parameter's gradient: along one random direction, or if that error
        is large, the median of several, since one may cross a bend of the loss. None if it cannot
        be measured."""
        first = self._error(name, random)
        if first is None or first <= TOLERANCE / 5:
            return first
        more = [self._error(name, random) for _ in range(_DIRECTIONS - 1)]
        told = [first, *(error for error in more if error is not None)]
        return median(told) if len(told) > _DIRECTIONS // 2 else None

    def _error(self, name: str, random: np.random.Generator) -> float | None:
        """Returns the error of a parameter's gradient along one random direction; None if it cannot
        be measured."""
        value = read_stored(self._stored[name], self._folder)
        length = math.sqrt(float(np.mean(np.square(value, dtype=np.float64)))) or 0.1
        direction = random.choice([-length, length], value.shape)
        changes = []
        for way in _WAYS:
            if self.is_late:
                return None
            changes.append(self._change(name, value, direction, way))
        clear = [c for c in changes if max(abs(c.found), abs(c.said)) > _SIGNAL * self._noise]
        pairs = pairwise(reversed(clear))
        settled = (short for short, long in pairs if short.distance(long) <= TOLERANCE / 4)
        return next((change.error for change in settled), None)

    def _change(self, name: str, value: Array, direction: Array, way: float) -> _Change:
        ends = [(value + sign * way * direction).astype(value.dtype) for sign in (1, -1)]
        losses = [self._session.run([self._loss], {**self._feeds, name: end})[0] for end in ends]
        moved = ends[0].astype(np.float64) - ends[1]
        said = float(np.sum(self.gradients[name].astype(np.float64) * moved)) / self._scale
        return _Change(way, float(losses[0]) - float(losses[1]), said)
