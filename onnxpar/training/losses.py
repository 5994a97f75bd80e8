"""Losses as nodes behind the output of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.errors import StrategyError
from onnxpar.grad.value import Builder, Value

IGNORED = -100
"""A label that does not count, as in PyTorch."""


def add_loss(graph: gs.Graph, kind: str, output: str | None, class_axis: int | None) -> Value:
    """Appends a loss to a graph, and inputs for what it is told from; returns the mean.

    kind        one of LOSSES, or the name of an output that is the loss itself
    output      the output that it is of; may be left out where there is one only
    class_axis  which dimension counts classes: by default the last, of four or more the second
    Errors: StrategyError.
    """
    outputs = {t.name: t for t in graph.outputs}
    builder = Builder(graph, "loss")
    if kind not in LOSSES:
        if kind not in outputs:
            raise StrategyError(
                f"loss {kind!r}: is neither one of {', '.join(LOSSES)} nor an output of the "
                f"model, which has {', '.join(outputs)}"
            )
        value = builder.value(outputs[kind])
        if value.size != 1:
            raise StrategyError(f"loss {kind!r}: has shape {list(value.shape)}; one number is due")
        return value.reshape([])
    if output is None and len(outputs) > 1:
        raise StrategyError(
            f"loss {kind}: of which output? give --loss-of, one of {', '.join(outputs)}"
        )
    if output is not None and output not in outputs:
        raise StrategyError(f"output {output!r}: the model has {', '.join(outputs)}")
    made = builder.value(outputs[output] if output else graph.outputs[0])
    return LOSSES[kind](made, class_axis)


def _target(graph: gs.Graph, name: str, dtype: type, shape: tuple[int, ...]) -> gs.Variable:
    taken = graph.tensors().keys()
    while name in taken:
        name += "_"
    tensor = gs.Variable(name, np.dtype(dtype), list(shape))
    graph.inputs.append(tensor)
    return tensor


def _by_class(op: str) -> Callable[[Value, int | None], Value]:
    def loss(y: Value, class_axis: int | None) -> Value:
        if y.rank < 2:
            raise StrategyError(f"output {y.tensor.name!r} has no dimension of classes")
        axis = (y.rank - 1 if y.rank < 4 else 1) if class_axis is None else class_axis % y.rank
        rest = tuple(s for a, s in enumerate(y.shape) if a != axis)
        labels = _target(y.builder.graph, "labels", np.int64, rest)
        given = y.builder.value(labels)
        if axis == y.rank - 1:
            y, given = y.reshape([-1, y.shape[-1]]), given.reshape([-1])
        elif axis != 1:
            y = y.transpose([0, axis, *(a for a in range(1, y.rank) if a != axis)])
        return y.op(op, given, ignore_index=IGNORED, reduction="mean")

    return loss


def _mean_square(y: Value, class_axis: int | None) -> Value:
    target = _target(y.builder.graph, "target", y.dtype.type, y.shape)
    difference = y - y.builder.value(target)
    return (difference * difference).mean()


def _binary(y: Value, class_axis: int | None) -> Value:
    """Of what stands before a Sigmoid where the model ends in one, else of scores."""
    made = y.tensor.inputs[0] if y.tensor.inputs else None
    scores = y.builder.value(made.inputs[0]) if made is not None and made.op == "Sigmoid" else y
    target = _target(y.builder.graph, "target", y.dtype.type, y.shape)
    # log(1 + exp(x)) - t x, with no exponential of a positive number
    zero = scores.op("Relu")
    value = zero - scores * y.builder.value(target) + (1.0 + (-scores.op("Abs")).exp()).log()
    return value.mean()


LOSSES: Mapping[str, Callable[[Value, int | None], Value]] = {
    "softmax-cross-entropy": _by_class("SoftmaxCrossEntropyLoss"),
    "nll": _by_class("NegativeLogLikelihoodLoss"),
    "mse": _mean_square,
    "bce": _binary,
}
