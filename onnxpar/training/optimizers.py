"""The optimizers, by name.

Optimizers that PyTorch has follow its classes of the same names. LAMB follows You et al., "Large
Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020), algorithm 2, with Adam's
bias correction; LARS, You et al., "Large Batch Training of Convolutional Networks" (2017),
algorithm 1; Lion, Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.training.adam_optimizers import Adam, AdamW, Lamb, NAdam, SparseAdam
from onnxpar.training.gradients.value import Value
from onnxpar.training.matrix_optimizers import Adafactor, Muon
from onnxpar.training.optimizer import Optimizer, Slots, State, Update, norm, trust


@dataclass(frozen=True)
class Sgd(Optimizer):
    """Plain gradient descent."""

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        return p - self.decayed(p, g) * rate, {}


@dataclass(frozen=True)
class Momentum(Optimizer):
    """Gradient descent along a decaying sum of past gradients (the buffer)."""

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise StrategyError("momentum: nesterov needs a momentum above 0; it is 0")

    def slots(self, shape: Sequence[int]) -> Slots:
        """Returns the shape of the buffer."""
        return {"momentum_buffer": shape}

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        g = self.decayed(p, g)
        buffer = state["momentum_buffer"] * self.momentum + g
        along = g + buffer * self.momentum if self.nesterov else buffer
        return p - along * rate, {"momentum_buffer": buffer}


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Gradient descent with steps divided by the root of the sum of all squared gradients so
    far."""

    epsilon: float = 1e-10

    def slots(self, shape: Sequence[int]) -> Slots:
        """Returns the shape of the sum of squares."""
        return {"sum": shape}

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        g = self.decayed(p, g)
        total = state["sum"] + g * g
        return p - g / (total.sqrt() + self.epsilon) * rate, {"sum": total}


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Gradient descent with steps divided by the root of a moving average of squared gradients.
    With `centered`, the square of the average gradient is subtracted from that average first."""

    alpha: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def slots(self, shape: Sequence[int]) -> Slots:
        """Returns the shapes of the averages, and of the buffer if there is a momentum."""
        names = ["square_avg"]
        names += ["grad_avg"] if self.centered else []
        names += ["momentum_buffer"] if self.momentum else []
        return dict.fromkeys(names, shape)

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        g = self.decayed(p, g)
        square = state["square_avg"] * self.alpha + g * g * (1 - self.alpha)
        following, around = {"square_avg": square}, square
        if self.centered:
            mean = state["grad_avg"] * self.alpha + g * (1 - self.alpha)
            following["grad_avg"] = mean
            # rounding may make it negative where the gradient hardly changes
            around = (square - mean * mean).op("Max", 0.0)
        along = g / (around.sqrt() + self.epsilon)
        if self.momentum:
            along = state["momentum_buffer"] * self.momentum + along
            following["momentum_buffer"] = along
        return p - along * rate, following


@dataclass(frozen=True)
class Lion(Optimizer):
    """Steps whose elements have one size, along the signs of a momentum, with decoupled weight
    decay."""

    beta1: float = 0.9
    beta2: float = 0.99

    def slots(self, shape: Sequence[int]) -> Slots:
        """Returns the shape of the momentum."""
        return {"exp_avg": shape}

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        mean = state["exp_avg"]
        along = (mean * self.beta1 + g * (1 - self.beta1)).op("Sign")
        following = mean * self.beta2 + g * (1 - self.beta2)
        return self.shrunk(p, rate) - along * rate, {"exp_avg": following}


@dataclass(frozen=True)
class Lars(Optimizer):
    """Gradient descent with a buffer of past steps. Each step is in proportion to the parameter's
    norm."""

    momentum: float = 0.9
    trust_coefficient: float = 1e-3

    def slots(self, shape: Sequence[int]) -> Slots:
        """Returns the shape of the buffer."""
        return {"momentum_buffer": shape}

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        length, other = norm(p), norm(g)
        local = trust(length * self.trust_coefficient, other + length * self.weight_decay)
        buffer = state["momentum_buffer"] * self.momentum + self.decayed(p, g) * (local * rate)
        return p - buffer, {"momentum_buffer": buffer}


def lazy_form(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that updates only the rows that a step looks up, as `optimizer` would.
    Errors: StrategyError if `optimizer` changes all rows in each step."""
    if type(optimizer) not in (Sgd, Adam, Adagrad):
        raise StrategyError(
            f"--lazy: {type(optimizer).__name__.lower()} changes rows that a step does not look "
            "up; use sgd, adam or adagrad"
        )
    if isinstance(optimizer, Adam) and optimizer.amsgrad:
        raise StrategyError("--lazy: SparseAdam has no amsgrad; leave it out")
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
    "rmsprop": RMSprop,
    "nadam": NAdam,
    "adafactor": Adafactor,
    "lion": Lion,
    "lars": Lars,
    "muon": Muon,
}


def make_optimizer(name: str, **options: Any) -> Optimizer | None:
    """Returns an optimizer by name; None for NONE. `options` are hyperparameters, named like the
    optimizer's fields. Errors: StrategyError."""
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
