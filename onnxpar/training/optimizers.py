"""Optimizers as graph nodes, which compute the next parameter and state from parameter, gradient
and state.

All follow PyTorch's classes of the same names; LAMB follows You et al., "Large Batch Optimization
for Deep Learning: Training BERT in 76 minutes" (2020), algorithm 2, with Adam's bias correction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from onnxpar.errors import StrategyError
from onnxpar.grad.value import Value

State = Mapping[str, Value]
DECAYS = ("beta1", "beta2")
"""Hyperparameters that are decay rates of moving averages: below 1."""
Update = tuple[Value, dict[str, Value]]


@dataclass(frozen=True)
class Optimizer:
    """An update rule for parameters. Fields are hyperparameters; the learning rate is an input of
    the step.

    slots   names of the state tensors of each parameter, which start as zeros
    counts  True if an update depends on the number of steps so far
    """

    weight_decay: float = 0.0

    slots: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Errors: StrategyError if a hyperparameter is out of range."""
        for field in fields(self):
            value, most = getattr(self, field.name), 1 if field.name in DECAYS else math.inf
            if not 0 <= value < most:
                known = "from 0 to below 1" if most == 1 else "0 or more"
                name = type(self).__name__.lower()
                raise StrategyError(f"{name}: {field.name} is {value}; it must be {known}")

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        """Appends the update of a parameter `p` with gradient `g`; returns the next parameter and
        its next state. `step`, a float64, counts updates from 1; it is None unless `counts`."""
        raise NotImplementedError

    def _decayed(self, p: Value, g: Value) -> Value:
        """Returns the gradient plus weight decay (L2 regularization)."""
        return g + p * self.weight_decay if self.weight_decay else g


@dataclass(frozen=True)
class Sgd(Optimizer):
    """Plain gradient descent."""

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        return p - self._decayed(p, g) * rate, {}


@dataclass(frozen=True)
class Momentum(Optimizer):
    """Gradient descent with a buffer of past gradients."""

    momentum: float = 0.9
    nesterov: bool = False

    slots: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise StrategyError("momentum: nesterov needs a momentum above 0; it is 0")

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        g = self._decayed(p, g)
        buffer = state["momentum_buffer"] * self.momentum + g
        along = g + buffer * self.momentum if self.nesterov else buffer
        return p - along * rate, {"momentum_buffer": buffer}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam; weight decay is added to the gradient."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    counts: ClassVar[bool] = True

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        direction, following = self._direction(self._decayed(p, g), state, step)
        return p - direction * rate, following

    def _direction(self, g: Value, state: State, step: Value | None) -> Update:
        """Returns Adam's direction, and the next state: the moving average of gradients over the
        root of that of squares, both with bias correction."""
        assert step is not None
        mean = state["exp_avg"] * self.beta1 + g * (1 - self.beta1)
        square = state["exp_avg_sq"] * self.beta2 + g * g * (1 - self.beta2)
        of_mean, of_square = (
            (1.0 - step.builder.constant(beta, step.dtype) ** step).cast(g.dtype)
            for beta in (self.beta1, self.beta2)
        )
        direction = self._ratio(mean, square, of_mean, of_square)
        return direction, {"exp_avg": mean, "exp_avg_sq": square}

    def _ratio(self, mean: Value, square: Value, of_mean: Value, of_square: Value) -> Value:
        return (mean / of_mean) / ((square / of_square).sqrt() + self.epsilon)


@dataclass(frozen=True)
class SparseAdam(Adam):
    """Adam of the rows that a step looks up. As in PyTorch's class of this name and in TensorFlow's
    LazyAdam, the bias correction counts all steps, and epsilon is added to the root of the mean
    square before its correction."""

    def _ratio(self, mean: Value, square: Value, of_mean: Value, of_square: Value) -> Value:
        return mean / (square.sqrt() + self.epsilon) * (of_square.sqrt() / of_mean)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    weight_decay: float = 0.01

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        direction, following = self._direction(g, state, step)
        if self.weight_decay:
            p = p - p * (rate * self.weight_decay)
        return p - direction * rate, following


@dataclass(frozen=True)
class Lamb(Adam):
    """AdamW with steps in proportion to the parameter's norm."""

    weight_decay: float = 0.01
    epsilon: float = 1e-6

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        direction, following = self._direction(g, state, step)
        along = self._decayed(p, direction)
        length, other = (p.builder.over_parts((v * v).sum()).sqrt() for v in (p, along))
        known = (length > 0.0).op("And", other > 0.0)
        trust = known.where(length / known.where(other, 1.0), 1.0)
        return p - along * (trust * rate), following


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Steps that shrink with the sum of squared gradients."""

    epsilon: float = 1e-10

    slots: ClassVar[tuple[str, ...]] = ("sum",)

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        g = self._decayed(p, g)
        total = state["sum"] + g * g
        return p - g / (total.sqrt() + self.epsilon) * rate, {"sum": total}


def lazy_form(optimizer: Optimizer) -> Optimizer:
    """Returns the form of an optimizer that updates only the rows that a step looks up. Errors:
    StrategyError if each step changes all rows."""
    if type(optimizer) not in (Sgd, Adam, Adagrad):
        raise StrategyError(
            f"--lazy: {type(optimizer).__name__.lower()} changes rows that a step does not look "
            "up; use sgd, adam or adagrad"
        )
    if optimizer.weight_decay:
        raise StrategyError(
            f"--lazy: a weight decay of {optimizer.weight_decay} changes rows that a step does not "
            "look up; leave it out"
        )
    if isinstance(optimizer, Adam):
        return SparseAdam(0.0, optimizer.beta1, optimizer.beta2, optimizer.epsilon)
    return optimizer  # a row without a gradient, and its state, stay as they are


NONE = "none"
"""No optimizer: the step returns gradients, and updates nothing."""
OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "sgd": Sgd,
    "momentum": Momentum,
    "adam": Adam,
    "adamw": AdamW,
    "lamb": Lamb,
    "adagrad": Adagrad,
}


def make_optimizer(name: str, **options: Any) -> Optimizer | None:
    """Returns an optimizer by name, None for NONE; `options` are hyperparameters, named like its
    fields. Errors: StrategyError."""
    if name not in (*OPTIMIZERS, NONE):
        raise StrategyError(f"--optimizer {name!r}: give one of {', '.join((*OPTIMIZERS, NONE))}")
    kind = OPTIMIZERS.get(name)
    known = [f.name for f in fields(kind)] if kind else []
    for option in options:
        if option not in known:
            have = ", ".join(known) or "none"
            raise StrategyError(
                f"optimizer {name} has no hyperparameter {option!r}; its hyperparameters: {have}"
            )
    return kind(**options) if kind else None
