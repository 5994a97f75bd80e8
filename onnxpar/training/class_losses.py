"""Losses over classes: cross-entropies by labels, and divergences between distributions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxpar.base.errors import StrategyError
from onnxpar.graph.training_spec import IGNORED
from onnxpar.training.gradients.value import Value
from onnxpar.training.loss_settings import LossSettings
from onnxpar.training.margins import MARGINS
from onnxpar.training.means import Mean, Metrics, Targets
from onnxpar.training.probabilities import scores_behind

LossFunction = Callable[[Value, LossSettings, Targets], Metrics]
"""A function from scores, settings and targets to the loss and other metrics. It appends nodes."""


def by_label(kind: str) -> LossFunction:
    """Returns the loss function of a cross-entropy of this kind ("softmax-cross-entropy", "nll",
    "arcface", "cosface"), whose targets are class numbers. The mean is weighted by the weights of
    the labels' classes, as in PyTorch."""

    def loss(y: Value, settings: LossSettings, targets: Targets) -> Metrics:
        axis = _class_axis(y, settings)
        rest = [a for a in range(y.rank) if a != axis]
        tensor = targets.sampled or targets.tensor("labels", np.int64, [y.shape[a] for a in rest])
        labels = y.builder.value(tensor)
        is_counted = labels.equal(IGNORED).op("Not")
        counts = is_counted.cast(y.wide().dtype).mean()
        right = y.op("ArgMax", axis=axis, keepdims=0).equal(labels).cast(np.float32).mean()
        scores = None if kind in MARGINS else scores_behind(y, "Softmax", axis)
        if scores is not None:
            y = scores if kind != "nll" else scores.op("LogSoftmax", axis=axis)
        if axis == y.rank - 1:
            y, labels = y.reshape([-1, y.shape[-1]]), labels.reshape([-1])
            is_counted = is_counted.reshape([-1])
        elif axis != 1:
            y = y.transpose([rest[0], axis, *rest[1:]])
        if kind in MARGINS:
            y = settings.margin.logits(kind, y, labels)
        weights = _class_weights(y, settings)
        if weights is None:
            of_loss, own = counts, None
        else:
            own = is_counted.where(weights.op("Gather", is_counted.where(labels, 0)), 0.0)
            of_loss = own.mean()
        total = _cross_entropy(kind, y.wide(), labels, own, settings.label_smoothing or 0.0)
        if settings.label_smoothing:
            smooth = _of_all_classes(y.wide(), is_counted, weights) * settings.label_smoothing
            total = total + smooth
        loss = Mean(total * (1 / max(labels.size, 1)), of_loss)
        return Metrics(loss, {"accuracy": Mean(right, counts)})

    return loss


def _class_axis(y: Value, settings: LossSettings) -> int:
    """Returns the dimension of classes of the scores `y`. Errors: StrategyError."""
    axis = settings.class_axis_of(y.rank)
    if y.rank < 2:
        raise StrategyError(
            f"output {y.tensor.name!r} has the shape {list(y.shape)}; a loss over classes needs a "
            "dimension of samples and one of classes; choose another output with --loss-of"
        )
    if not -y.rank <= axis < y.rank:
        raise StrategyError(
            f"class axis {axis}: output {y.tensor.name!r} has {y.rank} dimensions; give a number "
            f"from {-y.rank} to {y.rank - 1}"
        )
    return axis % y.rank


def _class_weights(y: Value, settings: LossSettings) -> Value | None:
    """Returns the weight of each class as a tensor; None if the loss has none. Classes are
    dimension 1 of the scores `y`. Errors: StrategyError."""
    weights = settings.class_weights
    if weights is None:
        return None
    if len(weights) != y.shape[1]:
        raise StrategyError(
            f"--class-weights: there are {len(weights)} weights, but {y.shape[1]} classes"
        )
    return y.builder.constant(weights, y.wide().dtype)


def _cross_entropy(
    kind: str, y: Value, labels: Value, weights: Value | None, smoothing: float
) -> Value:
    """Returns 1 - smoothing times the sum of the losses of all labels, each times its weight.
    Classes are dimension 1 of the scores `y`."""
    op = "NegativeLogLikelihoodLoss" if kind == "nll" else "SoftmaxCrossEntropyLoss"
    if weights is None:
        total = y.op(op, labels, ignore_index=IGNORED, reduction="sum")
    else:
        total = (y.op(op, labels, ignore_index=IGNORED, reduction="none") * weights).sum()
    return total * (1 - smoothing)


def _of_all_classes(y: Value, is_counted: Value, weights: Value | None) -> Value:
    """Returns the sum, over the labels that count (`is_counted`), of the mean weighted loss of all
    classes: the target of label smoothing. Classes are dimension 1 of the scores `y`."""
    of_class = y.op("LogSoftmax", axis=1)
    if weights is not None:
        of_class = of_class * weights.reshape([-1 if a == 1 else 1 for a in range(y.rank)])
    each = of_class.mean([1])
    return -is_counted.where(each, 0.0).sum()


def divergence(is_of_batch: bool) -> LossFunction:
    """Returns the loss function of a Kullback-Leibler divergence of log-probabilities from target
    probabilities: summed over classes, and divided by the number of samples (`is_of_batch`,
    PyTorch's batchmean) or by the number of all elements (PyTorch's mean). If the model ends in a
    Softmax over the classes, takes its logarithm."""

    def loss(y: Value, settings: LossSettings, targets: Targets) -> Metrics:
        axis = _class_axis(y, settings)
        target = y.builder.value(targets.tensor("target", y.dtype, y.shape)).wide()
        scores = scores_behind(y, "Softmax", axis)
        log_prob = y if scores is None else scores.op("LogSoftmax", axis=axis)
        is_some = target > 0.0
        own = is_some.where(target * is_some.where(target, 1.0).log(), 0.0)
        mean = targets.mean(own - target * log_prob.wide())
        factor = y.size / max(y.shape[0], 1) if is_of_batch else 1.0
        return Metrics(Mean(mean.total * factor, mean.count), {})

    return loss
