"""Appends a loss to an output of a model. `LOSSES` has the losses by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.base.near_names import nearest
from onnxpar.graph.tensors import is_float
from onnxpar.training.batch import Compared
from onnxpar.training.class_losses import LossFunction, by_label, divergence
from onnxpar.training.element_losses import (
    absolute,
    binary,
    huber,
    of_difference,
    smooth_l1,
    square,
)
from onnxpar.training.gradients.value import Builder
from onnxpar.training.loss_settings import BY_LABEL, LossSettings
from onnxpar.training.means import Mean, Metrics, Targets

LOSSES: Mapping[str, LossFunction] = {
    **{kind: by_label(kind) for kind in BY_LABEL},
    "mse": of_difference(square),
    "l1": of_difference(absolute),
    "huber": of_difference(huber),
    "smooth-l1": of_difference(smooth_l1),
    "bce": binary,
    "kl": divergence(is_of_batch=True),
    "kl-mean": divergence(is_of_batch=False),
}


def add_loss(
    builder: Builder,
    outputs: Mapping[str, gs.Tensor],
    kind: str,
    output: str | None,
    settings: LossSettings,
    targets: Targets,
) -> Metrics:
    """Appends a loss to a graph, with inputs for labels or targets. Returns the loss and other
    metrics.

    outputs   outputs of the model, by name
    kind      one of LOSSES, or the name of an output that is a loss
    output    the output to compare with the target; None if the model has only one
    settings  settings of the loss
    targets   adds the inputs for labels and targets

    Call `check_loss` first. Errors: StrategyError.
    """
    if kind not in LOSSES:
        value = builder.value(outputs[kind])
        if value.size != 1:
            raise StrategyError(
                f"loss {kind!r}: this output has the shape {list(value.shape)}, but a loss must be "
                "a single number; choose another output, or reduce this one in the model"
            )
        return Metrics(Mean(value.reshape([])), {})
    scores = builder.value(outputs[output] if output else next(iter(outputs.values())))
    if not is_float(scores.tensor):
        raise StrategyError(
            f"loss {kind}: output {scores.tensor.name!r} is of type {scores.dtype}, which has no "
            "gradient; choose an output of floating-point numbers with --loss-of"
        )
    return LOSSES[kind](scores, settings, targets)


def compared_by(
    outputs: Mapping[str, gs.Tensor], kind: str, output: str | None, settings: LossSettings
) -> Compared:
    """Returns the tensor that a loss compares with labels or a target. The parameters are those of
    `add_loss`."""
    if kind not in LOSSES:
        return Compared(outputs[kind])
    tensor = outputs[output] if output else next(iter(outputs.values()))
    rank = len(tensor.shape or ())  # an unknown shape is an error where gradients are made
    classes = settings.class_axis_of(rank) % max(rank, 1) if kind in BY_LABEL else None
    return Compared(tensor, [axis for axis in range(rank) if axis != classes])


def check_loss(
    outputs: Sequence[str], kind: str, output: str | None, settings: LossSettings
) -> None:
    """Checks the options of `add_loss` against the names of the model's outputs. Errors:
    StrategyError."""
    names = ", ".join(outputs)
    if kind not in LOSSES:
        if kind not in outputs:
            near = nearest(kind, LOSSES)
            raise StrategyError(
                f"loss {kind!r}: {f'did you mean {near!r}? ' if near else ''}give one of "
                f"{', '.join(LOSSES)}, or an output of the model that is the loss itself; the "
                f"outputs are {names}"
            )
        if output is not None:
            raise StrategyError(
                f"--loss-of: the loss {kind!r} is an output of the model itself; leave --loss-of "
                "out"
            )
    settings.check(kind)
    if kind not in LOSSES:
        return
    if output is None and len(outputs) > 1:
        raise StrategyError(
            f"loss {kind}: the model has several outputs; give --loss-of with one of {names}"
        )
    if output is not None and output not in outputs:
        raise StrategyError(
            f"output {output!r}: the model has no such output; its outputs: {names}"
        )
