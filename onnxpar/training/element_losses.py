"""Losses that compare each element of an output with the same element of the target."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxpar.base.errors import StrategyError
from onnxpar.training.class_losses import LossFunction
from onnxpar.training.gradients.value import Value
from onnxpar.training.loss_settings import LossSettings
from onnxpar.training.means import Metrics, Targets
from onnxpar.training.probabilities import is_probability, scores_behind

_LEAST = 1e-30
"""A probability up to this counts as 0: the gradient of its logarithm is near what floats hold."""


def of_difference(cost: Callable[[Value, float], Value]) -> LossFunction:
    """Returns the loss function that is the mean of `cost(difference, delta)`, where the difference
    is between output and target, and delta is a setting of the loss (1 by default)."""

    def loss(y: Value, settings: LossSettings, targets: Targets) -> Metrics:
        difference = (y - y.builder.value(targets.tensor("target", y.dtype, y.shape))).wide()
        delta = 1.0 if settings.delta is None else settings.delta
        return Metrics(targets.mean(cost(difference, delta)), {})

    return loss


def square(difference: Value, delta: float) -> Value:
    """Returns the squares of `difference`; `delta` is not used."""
    return difference * difference


def absolute(difference: Value, delta: float) -> Value:
    """Returns the absolute values of `difference`; `delta` is not used."""
    return difference.op("Abs")


def huber(difference: Value, delta: float) -> Value:
    """Returns the Huber loss of each element: half its square up to `delta`, beyond it a line with
    the slope at `delta`."""
    length = difference.op("Abs")
    near = length.op("Min", delta)
    return near * (length - near * 0.5)


def smooth_l1(difference: Value, delta: float) -> Value:
    """Returns the Huber loss divided by delta; PyTorch calls delta beta here."""
    return huber(difference, delta) * (1 / delta)


def binary(y: Value, settings: LossSettings, targets: Targets) -> Metrics:
    """Appends a binary cross-entropy, and returns it with the accuracy. It is computed from the
    scores before a Sigmoid, if the model ends in one (for precision); from the output as
    probabilities, if other ops make these; else from the output as scores."""
    target = y.builder.value(targets.tensor("target", y.dtype, y.shape))
    behind = scores_behind(y, "Sigmoid")
    weight = _pos_weight(y, settings)
    if behind is None and is_probability(y.tensor):
        p, t = y.wide(), target.wide()
        positive = t if weight is None else t * weight.wide()
        value = -(positive * _log(p) + (1.0 - t) * _log(1.0 - p))
        right = (p > 0.5).op("Equal", t > 0.5)
    else:
        scores = y if behind is None else behind
        # log(1 + exp(x)) - t x, but only with exponentials of numbers that are not positive
        rest = (1.0 + (-scores.op("Abs")).exp()).log()
        if weight is None:
            value = scores.op("Relu") - scores * target + rest
        else:
            factor = 1.0 + target * (weight - 1.0)
            value = (1.0 - target) * scores + factor * (rest + (-scores).op("Relu"))
        right = (scores > 0.0).op("Equal", target > 0.5)
    accuracy = targets.mean(right.cast(np.float32))
    return Metrics(targets.mean(value.wide()), {"accuracy": accuracy})


def _pos_weight(y: Value, settings: LossSettings) -> Value | None:
    """Returns the factor of positive targets as a tensor that broadcasts to the output; None if the
    loss has none. Errors: StrategyError."""
    weight = settings.pos_weight
    if weight is None:
        return None
    if len(weight) not in (1, *y.shape[-1:]):
        raise StrategyError(
            f"--pos-weight: there are {len(weight)} numbers, but the output {y.tensor.name!r} has "
            f"the shape {list(y.shape)}; give one number, or one for each element of its last "
            "dimension"
        )
    return y.builder.constant(weight if y.rank else weight[0], y.dtype)


def _log(p: Value) -> Value:
    """Returns the logarithm of each probability, and -100 for 0, as in PyTorch."""
    is_some = p > _LEAST
    return is_some.where(is_some.where(p, 1.0).log(), -100.0)
