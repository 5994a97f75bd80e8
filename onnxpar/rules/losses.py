"""Rules of losses over classes. If the classes are split, the ranks exchange a few numbers for each
row of scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import dtype_of, given, tensor_shape
from onnxpar.rules.communicate import (
    communicating,
    finish,
    has_output,
    like,
    local_places,
    number,
    total,
    widen,
)
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, names, rule


@rule("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss")
def class_loss(node: gs.Node) -> Rule:
    """Sharding rule of NegativeLogLikelihoodLoss, SoftmaxCrossEntropyLoss: `n c s, n s, c -> n s`:
    scores, labels, weights of classes c. The ranks communicate if c is split, and also if n or s is
    split and the op reduces the losses."""
    shape = tensor_shape(node.inputs[0]) or ()
    space = names("s", len(shape) - 2)
    scores, labels = dims_text(["n", "c", *space]), dims_text(["n", *space])
    reduction = node.attrs.get("reduction", "mean")
    reduction = reduction.decode() if isinstance(reduction, bytes) else reduction
    results = [labels if reduction == "none" else "()"]
    results += [scores if t.name else "_" for t in node.outputs[1:]]
    weights = [] if given(node, 2) is None else ["c"]
    rest = ["_"] * (len(node.inputs) - 2 - len(weights))
    rows = [] if reduction == "none" else ["n", *space]
    lower = _Loss(node.op, reduction, node.attrs.get("ignore_index"), rows).lower
    return einsum(
        node,
        f"{', '.join([scores, labels, *weights, *rest])} -> {'; '.join(results)}",
        reduce={},
        **communicating(node, ["c", *rows], shape if rows else shape[1:2], lower),
    )


@dataclass(frozen=True)
class _Loss:
    """Replaces a loss whose classes or rows are split.

    op         the node's op
    reduction  "none", "sum" or "mean"
    ignored    the label of rows that do not count; None: all count
    rows       the factors of rows over which the loss is reduced; none without a reduction
    """

    op: str
    reduction: str
    ignored: int | None
    rows: list[str]

    def lower(self, build: Lowering) -> None:
        """Computes the weighted losses of the labels whose class is in the rank's shard
        (zeros for other labels), adds them over the ranks, and makes the result of the node."""
        node = build.local.node
        scores = widen(build, build.input(0))
        if self.op == "SoftmaxCrossEntropyLoss":
            scores = _log_softmax(build, scores)
            if has_output(build, 1):
                finish(build, "Identity", [scores], 1)
        label, held = self._local_labels(build)
        at = build.add("Unsqueeze", [label], axes=[1])
        losses = build.add("GatherElements", [build.filled(scores, "c", 1), at], axis=1)
        losses = build.add("Neg", [build.add("Squeeze", [losses], axes=[1])])
        weight: Any = like(scores, 1)
        if given(node, 2) is not None:
            weights = build.filled(widen(build, build.input(2)), "c", 0)
            weight = build.add("Gather", [weights, label], axis=0)
            losses = build.add("Mul", [losses, weight])
        zero = like(scores, 0)
        losses = build.add("Where", [held, losses, zero])
        if self.reduction == "none":
            finish(build, "Identity", [build.all_reduce(losses, ["c"])])
            return
        loss = self._sum(build, losses)
        if self.reduction == "sum":
            finish(build, "Identity", [loss])
        elif given(node, 2) is None and self.ignored is None:
            counts = math.prod(s for i, s in enumerate(node.inputs[0].shape) if i != 1)
            finish(build, "Div", [loss, number(build, counts, dtype_of(scores))])
        else:
            weights = build.add("Where", [held, weight, zero])
            finish(build, "Div", [loss, self._sum(build, weights)])

    def _sum(self, build: Lowering, x: gs.Tensor) -> gs.Tensor:
        """The sum of `x` over all rows and classes, across all ranks."""
        return build.all_reduce(build.add("ReduceSum", [x], keepdims=0), ["c", *self.rows])

    def _local_labels(self, build: Lowering) -> tuple[gs.Tensor, gs.Tensor]:
        """Returns (labels as positions among the rank's classes, with 0 for classes of other ranks;
        a mask that is True for labels that the rank counts). A label beyond all classes stays
        beyond the rank's classes, and the kernel refuses it."""
        label = build.input(1)
        classes = build.local.node.inputs[0].shape[1]
        dtype = dtype_of(label)

        def number(value: Callable[[Local], int]) -> gs.Tensor:
            return build.per_rank(lambda local: np.array(value(local), dtype))

        exists = _within(build, label, np.array(classes, dtype))
        if build.local.is_split("c") and not build.local.is_run("c"):
            places = build.per_rank(lambda local: local_places(local, "c", classes).astype(dtype))
            valid = build.add("Where", [exists, label, np.array(0, dtype)])
            position = build.add("Gather", [places, valid], axis=0)
            held = build.add("And", [exists, build.add("Greater", [position, np.array(-1, dtype)])])
        else:
            start = number(lambda local: local.interval("c")[0] if local.is_split("c") else 0)
            position = build.add("Sub", [label, start])
            held = _within(build, position, number(lambda local: local.size("c")))
        if self.ignored is not None:
            is_ignored = build.add("Equal", [label, np.array(self.ignored, dtype)])
            held = build.add("And", [held, build.add("Not", [is_ignored])])
            exists = build.add("Or", [exists, is_ignored])
        beyond = np.array(classes, dtype)
        elsewhere = build.add("Where", [exists, np.array(0, dtype), beyond])
        return build.add("Where", [held, position, elsewhere]), held


def _log_softmax(build: Lowering, scores: gs.Tensor) -> gs.Tensor:
    """Returns the log-probabilities of the rank's classes; ranks exchange the largest score and the
    sum of exponentials."""
    largest = build.add("ReduceMax", [scores], axes=[1], keepdims=1)
    shifted = build.add("Sub", [scores, build.all_reduce(largest, ["c"], "max")])
    powers = build.add("Exp", [shifted])
    return build.add("Sub", [shifted, build.add("Log", [total(build, powers, [1], ["c"])])])


def _within(build: Lowering, index: gs.Tensor, count: Any) -> gs.Tensor:
    """Returns a boolean mask: True for indices in [0, count)."""
    above = build.add("Greater", [index, like(index, -1)])
    return build.add("And", [build.add("Less", [index, count]), above])
