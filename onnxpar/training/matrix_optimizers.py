"""Optimizers whose updates depend on rows and columns of a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxpar.base.errors import StrategyError
from onnxpar.training.adam_optimizers import AdamW
from onnxpar.training.gradients.value import Value
from onnxpar.training.optimizer import Optimizer, Slots, State, Update, norm

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
"""Coefficients and number of steps of Muon's Newton-Schulz iteration."""


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adam without momentum, which keeps means of squares by row and by column only. Its step is in
    proportion to the parameter's root mean square (Shazeer and Stern, 2018).

    beta2_decay     exponent of the decay of the means
    epsilon         the least root mean square of a parameter
    clip_threshold  the largest root mean square of an update
    """

    beta2_decay: float = -0.8
    epsilon: float = 1e-3
    clip_threshold: float = 1.0

    counts: ClassVar[bool] = True
    needs_whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_threshold < 1:
            raise StrategyError(
                f"adafactor: clip_threshold is {self.clip_threshold}; it must be 1 or more"
            )

    def slots(self, shape: Sequence[int]) -> Slots:
        """Returns the shapes of the means of squares by row and by column; of a vector, of the
        squares."""
        if len(shape) < 2:
            return {"variance": shape}
        *outer, rows, columns = shape
        return {"row_var": (*outer, rows, 1), "col_var": (*outer, 1, columns)}

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        assert step is not None
        share = (step**self.beta2_decay).cast(p.dtype)
        longest = (1.0 / step.sqrt()).cast(p.dtype)
        size = math.sqrt(max(p.size, 1))
        length = (norm(p) / size).op("Max", self.epsilon) * rate.op("Min", longest)
        variance, following = self._variance(g, state, share)
        tiny = float(np.finfo(p.dtype).eps)
        along = g / variance.op("Max", tiny * tiny).sqrt()
        beyond = (norm(along) / (size * self.clip_threshold)).op("Max", 1.0)
        return self.shrunk(p, rate) - along * (length / beyond), following

    def _variance(self, g: Value, state: State, share: Value) -> Update:
        """Returns the estimated mean squares of a gradient, and the next state. The state moves by
        the fraction `share` towards the squares of this step."""
        square = g * g

        def moved(slot: str, to: Value) -> Value:
            return state[slot] + (to - state[slot]) * share

        if g.rank < 2:
            variance = moved("variance", square)
            return variance, {"variance": variance}
        rows = moved("row_var", square.mean([-1], keepdims=True))
        columns = moved("col_var", square.mean([-2], keepdims=True))
        tiny = float(np.finfo(g.dtype).eps)
        whole = rows.mean([-2], keepdims=True).op("Max", tiny)
        return rows * columns / whole, {"row_var": rows, "col_var": columns}


@dataclass(frozen=True)
class Muon(Optimizer):
    """Steps of matrices along their orthogonalized momentum (Jordan et al., 2024); other parameters
    follow AdamW.

    match_rms_adamw  True for steps with the size of AdamW's steps
    epsilon          the least norm of a momentum
    beta1, beta2     the numbers of AdamW
    """

    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    match_rms_adamw: bool = False
    epsilon: float = 1e-7
    beta1: float = 0.9
    beta2: float = 0.999

    counts: ClassVar[bool] = True
    needs_whole: ClassVar[bool] = True

    def slots(self, shape: Sequence[int]) -> Slots:
        """Returns the shape of a matrix's momentum; for other parameters, the shapes of AdamW's
        state."""
        return {"momentum_buffer": shape} if len(shape) == 2 else self._of_others.slots(shape)

    @property
    def _of_others(self) -> AdamW:
        """The AdamW for parameters that are no matrices."""
        return AdamW(self.weight_decay, self.beta1, self.beta2)

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        if p.rank != 2:
            return self._of_others.update(p, g, state, rate, step)
        before = state["momentum_buffer"]
        buffer = before + (g - before) * (1 - self.momentum)
        along = g + (buffer - g) * self.momentum if self.nesterov else buffer
        rows, columns = p.shape
        scale = math.sqrt(max(1, rows / max(columns, 1)))
        if self.match_rms_adamw:
            scale = 0.2 * math.sqrt(max(rows, columns))
        step_of = self._orthogonal(along) * (rate * scale)
        return self.shrunk(p, rate) - step_of, {"momentum_buffer": buffer}

    def _orthogonal(self, x: Value) -> Value:
        """Returns a matrix with the singular vectors of `x` and singular values near 1. PyTorch
        computes in bfloat16; this function computes in the parameter's type."""
        a, b, c = _COEFFICIENTS
        is_tall = x.shape[0] > x.shape[1]
        x = x.swap() if is_tall else x
        x = x / norm(x).op("Max", self.epsilon)
        for _ in range(_ITERATIONS):
            gram = x @ x.swap()
            x = x * a + (gram * b + (gram @ gram) * c) @ x
        return x.swap() if is_tall else x
