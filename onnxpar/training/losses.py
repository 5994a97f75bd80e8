"""Appends a loss to an output of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from onnxpar.errors import StrategyError
from onnxpar.grad.value import Builder, Value
from onnxpar.ir.tensors import is_float
from onnxpar.ir.training_spec import IGNORED, SAMPLES
from onnxpar.training.margins import DEFAULT_MARGIN, MARGINS, Margin
from onnxpar.training.probabilities import is_probability, scores_behind

BY_CLASS = ("softmax-cross-entropy", "nll", *MARGINS)
_LEAST = 1e-30
"""A probability up to this counts as 0: the gradient of its logarithm is near what floats hold."""


@dataclass(frozen=True)
class LossSettings:
    """Settings of a loss; each holds for some losses only.

    class_axis  the dimension of classes: by default the last, or the second of four or more
    margin      the numbers of a margin softmax
    """

    class_axis: int | None = None
    margin: Margin = DEFAULT_MARGIN


@dataclass
class Targets:
    """Graph inputs for labels and targets; each is added to the graph on first use.

    sampled  the labels among the sampled classes, if the scores are those of a sampled head
    batch    number of samples in a batch, if a batch may have fewer, by the input SAMPLES
    """

    graph: gs.Graph
    made: dict[str, gs.Variable] = field(default_factory=dict)
    sampled: gs.Tensor | None = None
    batch: int | None = None

    def tensor(self, name: str, dtype: Any, shape: Sequence[int]) -> gs.Variable:
        """Returns the input for `name`. Its name in the graph has underscores appended if another
        tensor has that name."""
        if name not in self.made:
            free, taken = name, self.graph.tensors().keys()
            while free in taken:
                free += "_"
            self.made[name] = gs.Variable(free, np.dtype(dtype), list(shape))
            self.graph.inputs.append(self.made[name])
        return self.made[name]

    def mean(self, each: Value) -> Mean:
        """Returns the mean of a number for each element of the target, over the samples of a batch
        that may have fewer than the graph has room for."""
        if self.batch is None or each.shape[:1] != (self.batch,):
            return Mean(each.mean())
        # a float: integers may decide shapes, so they could not be fed
        given = self.tensor(SAMPLES, np.float32, [])
        given.onnx_default = numpy_helper.from_array(np.array(self.batch, np.float32), given.name)
        samples = each.builder.value(given)
        place = each.builder.arange(self.batch, np.float32).reshape([-1] + [1] * (each.rank - 1))
        share = samples.op("Max", 0.0).op("Min", float(self.batch)) * (1 / self.batch)
        return Mean((place < samples).where(each, 0.0).mean(), share)


@dataclass(frozen=True)
class Mean:
    """A mean over those elements of a batch that count: `total` is their sum, and `count` their
    number, both divided by the number of all elements of the batch; 1 if all count."""

    total: Value
    count: Value | None = None

    def of(self, count: Value | None, parts: int) -> Value:
        """Returns the share of the batch in the mean over a larger batch of so many parts, which
        are added up; `count` is the sum of the counts of all parts. NaN if nothing counts."""
        if count is None:
            return self.total if parts == 1 else self.total * (1 / parts)
        return self.total / count.cast(self.total.dtype)


@dataclass(frozen=True)
class Metrics:
    """The mean loss over the samples, and other metrics by name."""

    loss: Mean
    others: Mapping[str, Mean]


def add_loss(
    builder: Builder,
    outputs: Mapping[str, gs.Tensor],
    kind: str,
    output: str | None,
    settings: LossSettings,
    targets: Targets,
) -> Metrics:
    """Appends a loss to a graph, with inputs for labels or targets; returns the loss and other
    metrics.

    outputs  outputs of the model, by name
    kind     one of LOSSES, or the name of an output that is a loss
    output   the output to compare with the target; None if the model has only one
    `check_loss` has accepted these options. Errors: StrategyError.
    """
    if kind not in LOSSES:
        value = builder.value(outputs[kind])
        if value.size != 1:
            raise StrategyError(
                f"loss {kind!r}: this output has the shape {list(value.shape)}, but a loss must be "
                "a single number; choose another output, or reduce this one in the model"
            )
        return Metrics(Mean(value.reshape([])), {})
    made = builder.value(outputs[output] if output else next(iter(outputs.values())))
    if not is_float(made.tensor):
        raise StrategyError(
            f"loss {kind}: output {made.tensor.name!r} is of type {made.dtype}, which has no "
            "gradient; choose an output of floating-point numbers with --loss-of"
        )
    return LOSSES[kind](made, settings, targets)


def check_loss(
    outputs: Sequence[str], kind: str, output: str | None, settings: LossSettings
) -> None:
    """Checks the options of `add_loss` against the names of the model's outputs. Errors:
    StrategyError."""
    names, class_axis = ", ".join(outputs), settings.class_axis
    if kind in LOSSES or kind in outputs:
        settings.margin.check(kind)
    if kind not in LOSSES:
        if kind not in outputs:
            raise StrategyError(
                f"loss {kind!r}: give one of {', '.join(LOSSES)}, or an output of the model that "
                f"is the loss itself; the outputs are {names}"
            )
        for option, given in (("--loss-of", output), ("--class-axis", class_axis)):
            if given is not None:
                raise StrategyError(
                    f"{option}: the loss {kind!r} is an output of the model itself; leave {option} "
                    "out"
                )
        return
    if output is None and len(outputs) > 1:
        raise StrategyError(
            f"loss {kind}: the model has several outputs; give --loss-of with one of {names}"
        )
    if output is not None and output not in outputs:
        raise StrategyError(
            f"output {output!r}: the model has no such output; its outputs: {names}"
        )
    if class_axis is not None and kind not in BY_CLASS:
        raise StrategyError(
            f"class axis {class_axis}: the loss {kind} has no classes; only "
            f"{', '.join(BY_CLASS)} have; leave --class-axis out"
        )


LossFunction = Callable[[Value, LossSettings, Targets], Metrics]


def _by_class(kind: str, op: str) -> LossFunction:
    def loss(y: Value, settings: LossSettings, targets: Targets) -> Metrics:
        class_axis = settings.class_axis
        if y.rank < 2:
            raise StrategyError(
                f"output {y.tensor.name!r} has the shape {list(y.shape)}; a loss over classes "
                "needs a dimension of samples and one of classes; choose another output with "
                "--loss-of"
            )
        axis = (y.rank - 1 if y.rank < 4 else 1) if class_axis is None else class_axis
        if not -y.rank <= axis < y.rank:
            raise StrategyError(
                f"class axis {axis}: output {y.tensor.name!r} has {y.rank} dimensions; give a "
                f"number from {-y.rank} to {y.rank - 1}"
            )
        axis %= y.rank
        rest = [a for a in range(y.rank) if a != axis]
        shape = [y.shape[a] for a in rest]
        given = targets.sampled or targets.tensor("labels", np.int64, shape)
        labels = y.builder.value(given)
        counts = labels.equal(IGNORED).op("Not").cast(np.float32).mean()
        right = y.op("ArgMax", axis=axis, keepdims=0).equal(labels).cast(np.float32).mean()
        scores = None if kind in MARGINS else scores_behind(y, "Softmax", axis)
        if scores is not None:
            y = scores if kind != "nll" else scores.op("LogSoftmax", axis=axis)
        if axis == y.rank - 1:
            y, labels = y.reshape([-1, y.shape[-1]]), labels.reshape([-1])
        elif axis != 1:
            y = y.transpose([rest[0], axis, *rest[1:]])
        if kind in MARGINS:
            y = settings.margin.logits(kind, y, labels)
        total = y.wide().op(op, labels, ignore_index=IGNORED, reduction="sum")
        loss = Mean(total * (1 / max(labels.size, 1)), counts)
        return Metrics(loss, {"accuracy": Mean(right, counts)})

    return loss


def _mean_square(y: Value, settings: LossSettings, targets: Targets) -> Metrics:
    difference = (y - y.builder.value(targets.tensor("target", y.dtype, y.shape))).wide()
    return Metrics(targets.mean(difference * difference), {})


def _binary(y: Value, settings: LossSettings, targets: Targets) -> Metrics:
    """Appends a binary cross-entropy: of the scores behind a Sigmoid, for precision; of
    probabilities, if the model makes them by other ops; else of the output as scores."""
    target = y.builder.value(targets.tensor("target", y.dtype, y.shape))
    behind = scores_behind(y, "Sigmoid")
    if behind is None and is_probability(y.tensor):
        p, t = y.wide(), target.wide()
        value = -(t * _log(p) + (1.0 - t) * _log(1.0 - p))
        right = (p > 0.5).op("Equal", t > 0.5)
    else:
        scores = y if behind is None else behind
        # log(1 + exp(x)) - t x, but only with exponentials of numbers that are not positive
        value = scores.op("Relu") - scores * target + (1.0 + (-scores.op("Abs")).exp()).log()
        right = (scores > 0.0).op("Equal", target > 0.5)
    accuracy = targets.mean(right.cast(np.float32))
    return Metrics(targets.mean(value.wide()), {"accuracy": accuracy})


def _log(p: Value) -> Value:
    """Returns the logarithm, and -100 for 0, as in PyTorch."""
    is_some = p > _LEAST
    return is_some.where(is_some.where(p, 1.0).log(), -100.0)


LOSSES: Mapping[str, LossFunction] = {
    "softmax-cross-entropy": _by_class("softmax-cross-entropy", "SoftmaxCrossEntropyLoss"),
    "nll": _by_class("nll", "NegativeLogLikelihoodLoss"),
    "mse": _mean_square,
    "bce": _binary,
    **{kind: _by_class(kind, "SoftmaxCrossEntropyLoss") for kind in MARGINS},
}
