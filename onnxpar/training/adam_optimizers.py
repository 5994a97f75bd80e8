"""Adam and its relatives: steps along a moving average of gradients, divided by the root of a
moving average of their squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from onnxpar.training.gradients.value import Value
from onnxpar.training.optimizer import Optimizer, Slots, State, Update, norm, trust


@dataclass(frozen=True)
class Moments(Optimizer):
    """The part that Adam and its relatives share: moving averages of gradients and of their
    squares."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    counts: ClassVar[bool] = True

    def slots(self, shape: Sequence[int]) -> Slots:
        """Returns the shapes of both moving averages."""
        return {"exp_avg": shape, "exp_avg_sq": shape}

    def averages(self, g: Value, state: State) -> tuple[Value, Value]:
        """Returns the next moving averages of gradients and of squares."""
        mean = state["exp_avg"] * self.beta1 + g * (1 - self.beta1)
        return mean, state["exp_avg_sq"] * self.beta2 + g * g * (1 - self.beta2)

    def corrections(self, g: Value, step: Value | None) -> tuple[Value, Value]:
        """Returns the bias corrections 1 - beta1 ** step and 1 - beta2 ** step, by which the
        averages are divided because they started as zeros."""
        assert step is not None
        of_mean, of_square = (
            (1.0 - step.builder.constant(beta, step.dtype) ** step).cast(g.dtype)
            for beta in (self.beta1, self.beta2)
        )
        return of_mean, of_square

    def direction(self, g: Value, state: State, step: Value | None) -> Update:
        """Returns Adam's direction and the next state. The direction is the moving average of
        gradients over the root of the moving average of squares, both with bias correction."""
        mean, square = self.averages(g, state)
        of_mean, of_square = self.corrections(g, step)
        largest, following = self.kept(square, state)
        along = (mean / of_mean) / ((largest / of_square).sqrt() + self.epsilon)
        return along, {"exp_avg": mean, "exp_avg_sq": square, **following}

    def kept(self, square: Value, state: State) -> Update:
        """Returns the average of squares by which Adam divides, and further state for it. Here,
        this is the new average `square`; amsgrad takes the largest one so far."""
        return square, {}


@dataclass(frozen=True)
class Adam(Moments):
    """Adam; weight decay is added to the gradient. With `amsgrad`, it divides by the largest
    average of squares so far."""

    amsgrad: bool = False

    def slots(self, shape: Sequence[int]) -> Slots:
        """Returns the shapes of the moving averages, and with `amsgrad` of the largest average of
        squares."""
        more = {"max_exp_avg_sq": shape} if self.amsgrad else {}
        return {**super().slots(shape), **more}

    def kept(self, square: Value, state: State) -> Update:
        """Returns the largest average of squares so far with `amsgrad`, else this step's."""
        if not self.amsgrad:
            return square, {}
        largest = state["max_exp_avg_sq"].op("Max", square)
        return largest, {"max_exp_avg_sq": largest}

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        """Returns the next parameter, and the next state by name."""
        direction, following = self.direction(self.decayed(p, g), state, step)
        return p - direction * rate, following


@dataclass(frozen=True)
class SparseAdam(Moments):
    """Adam that updates only the rows that a step looks up. As in PyTorch's class of this name and
    in TensorFlow's LazyAdam, the bias correction counts all steps, and epsilon is added to the root
    of the mean square before its correction."""

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        mean, square = self.averages(g, state)
        of_mean, of_square = self.corrections(g, step)
        direction = mean / (square.sqrt() + self.epsilon) * (of_square.sqrt() / of_mean)
        return p - direction * rate, {"exp_avg": mean, "exp_avg_sq": square}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    weight_decay: float = 0.01

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        direction, following = self.direction(g, state, step)
        return self.shrunk(p, rate) - direction * rate, following


@dataclass(frozen=True)
class Lamb(Moments):
    """AdamW whose step has a length in proportion to the parameter's norm."""

    weight_decay: float = 0.01
    epsilon: float = 1e-6

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        direction, following = self.direction(g, state, step)
        along = self.decayed(p, direction)
        return p - along * (trust(norm(p), norm(along)) * rate), following


@dataclass(frozen=True)
class NAdam(Moments):
    """Adam with Nesterov's momentum, which grows over the steps to beta1."""

    momentum_decay: float = 4e-3

    def slots(self, shape: Sequence[int]) -> Slots:
        """Returns the shapes of the moving averages, and of 1 minus the product of all momentums so
        far, which is zero at first."""
        return {**super().slots(shape), "mu_complement": ()}

    def update(self, p: Value, g: Value, state: State, rate: Value, step: Value | None) -> Update:
        mean, square = self.averages(self.decayed(p, g), state)
        _, of_square = self.corrections(g, step)
        mu, following = (self._momentum(step, ahead).cast(p.dtype) for ahead in (0, 1))
        complement = 1.0 - mu + state["mu_complement"] * mu
        ahead = 1.0 - following + complement * following
        root = (square / of_square).sqrt() + self.epsilon
        of_gradient, of_mean = (1.0 - mu) / complement * rate, following / ahead * rate
        along = (self.decayed(p, g) * of_gradient + mean * of_mean) / root
        return p - along, {"exp_avg": mean, "exp_avg_sq": square, "mu_complement": complement}

    def _momentum(self, step: Value | None, ahead: int) -> Value:
        """Returns NAdam's momentum at this step, or at a step that is `ahead`."""
        assert step is not None
        count = (step + float(ahead)) * self.momentum_decay
        power = step.builder.constant(0.96, step.dtype) ** count
        return (1.0 - power * 0.5) * self.beta1
