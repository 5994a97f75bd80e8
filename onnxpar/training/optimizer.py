"""The interface of optimizers, which add nodes that compute the next parameter and state from
parameter, gradient and state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from onnxpar.base.errors import StrategyError
from onnxpar.training.gradients.value import Value

State = Mapping[str, Value]
"""The state of a parameter's optimizer before a step, such as its momentum, by name."""
DECAYS = ("beta1", "beta2", "alpha")
"""Hyperparameters that are decay rates of moving averages: below 1."""
BELOW_ZERO = ("beta2_decay",)
"""Hyperparameters that are exponents of a decay: 0 or less."""
Update = tuple[Value, dict[str, Value]]
"""The next value of a parameter (or another result), and the next state by name."""
Slots = Mapping[str, Sequence[int]]
"""The shapes of a parameter's state tensors, by name."""


@dataclass(frozen=True)
class Optimizer:
    """An update rule for parameters. Its fields are hyperparameters; the learning rate is an input
    of the step.

    counts       True if an update depends on the number of steps so far
    needs_whole  True if an update needs the whole parameter, so that the program of a rank that has
                 a part of it cannot compute the update
    """

    weight_decay: float = 0.0

    counts: ClassVar[bool] = False
    needs_whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Checks the hyperparameters. Errors: StrategyError if one is out of range."""
        for field in fields(self):
            value, known = getattr(self, field.name), "0 or more"
            is_right = 0 <= value < math.inf
            if field.name in DECAYS:
                is_right, known = 0 <= value < 1, "from 0 to below 1"
            elif field.name in BELOW_ZERO:
                is_right, known = -math.inf < value <= 0, "0 or less"
            if not is_right:
                name = type(self).__name__.lower()
                raise StrategyError(f"{name}: {field.name} is {value}; it must be {known}")

    def slots(self, shape: Sequence[int]) -> Slots:
        """Returns the shapes of the state tensors of a parameter with this shape, by name. They
        start as zeros."""
        return {}

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        """Appends the update of a parameter. Returns the next parameter, and its next state by
        name.

        p      the parameter
        g      its gradient
        state  its state, with the names of `slots`
        rate   the learning rate
        step   the number of updates, from 1, as a float64; None unless `counts`
        """
        raise NotImplementedError

    def decayed(self, p: Value, g: Value) -> Value:
        """Returns the gradient plus weight decay (L2 regularization)."""
        return g + p * self.weight_decay if self.weight_decay else g

    def shrunk(self, p: Value, rate: Value) -> Value:
        """Returns the parameter after decoupled weight decay: p * (1 - rate * weight_decay)."""
        return p - p * (rate * self.weight_decay) if self.weight_decay else p


def norm(x: Value) -> Value:
    """Returns the Euclidean norm of a parameter, or of a tensor of its shape, over all shards."""
    return x.builder.over_parts((x * x).sum()).sqrt()


def trust(length: Value, other: Value) -> Value:
    """Returns the quotient length / other of two norms, by which LAMB and LARS scale a step; 1 if
    one of the norms is zero."""
    known = (length > 0.0).op("And", other > 0.0)
    return known.where(length / known.where(other, 1.0), 1.0)
