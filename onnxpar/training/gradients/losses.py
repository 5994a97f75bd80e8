"""Gradients of ONNX's loss ops."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@vjp("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(v: Vjp) -> Grads:
    """The gradient rule of SoftmaxCrossEntropyLoss: the gradient of the scores is the probabilities
    minus the one-hot labels, times the weights of the labels."""
    loss = _ClassLoss(v)
    log_prob = v.output(1, v.x.dtype, v.x.shape)
    target = loss.is_label.cast(v.x.dtype)
    through = (log_prob.exp() - target) * loss.by_label
    of_log_prob = v.dys[1] if len(v.dys) > 1 else None
    if of_log_prob is not None:
        through = through + of_log_prob - log_prob.exp() * of_log_prob.sum([1], keepdims=True)
    return through, None, loss.by_class(log_prob)


@vjp("NegativeLogLikelihoodLoss")
def negative_log_likelihood(v: Vjp) -> Grads:
    loss = _ClassLoss(v)
    return loss.is_label.where(-loss.by_label, 0.0), None, loss.by_class(v.x)


class _ClassLoss:
    """The loss over classes that a node computes for each sample: the negative score of the
    sample's label, times the weight of the label's class."""

    def __init__(self, v: Vjp) -> None:
        self.v = v
        self.labels = v.operands[1]
        ignored = v.attr("ignore_index")
        self.ignored = None if ignored is None else self.labels.equal(ignored)

    @cached_property
    def is_label(self) -> Value:
        """Returns a Boolean tensor of the shape of the scores [sample, class, ...]: true at each
        sample's label."""
        classes = self.v.builder.arange(self.v.x.shape[1], self.labels.dtype)
        shape = [-1 if a == 1 else 1 for a in range(self.v.x.rank)]
        return self.labels.unsqueeze([1]).equal(classes.reshape(shape))

    @cached_property
    def weights(self) -> Value | None:
        """The weight of each label's class; None if the node has no weights."""
        of_class = self.v.operand(2)
        classes = self.labels if self.ignored is None else self.ignored.where(0, self.labels)
        return None if of_class is None else of_class.op("Gather", classes)

    @cached_property
    def shares(self) -> Value:
        """The gradient of each label's loss, without the class weight; zero for ignored labels."""
        shares = self.v.dy
        if self.v.attr("reduction") == "mean":
            shares = self._averaged(shares)
        return self._counted(shares.expand(self.labels.shape))

    def _averaged(self, dy: Value) -> Value:
        """Returns a gradient divided by the sum of the weights of all labels that are not ignored;
        zero if the sum is zero."""
        if self.ignored is None and self.weights is None:
            return dy * (1 / max(self.labels.size, 1))
        wide = np.promote_types(dy.dtype, np.float32)  # half precision counts to 65504
        one = self.v.builder.constant(1, wide)
        weights = one if self.weights is None else self.weights.cast(wide)
        total = self._counted(weights.expand(self.labels.shape)).sum()
        return total.equal(0.0).where(0.0, dy.cast(wide) / total).cast(dy.dtype)

    def _counted(self, values: Value) -> Value:
        """Returns the values with zeros for ignored labels."""
        return values if self.ignored is None else self.ignored.where(0.0, values)

    @property
    def by_label(self) -> Value:
        """The gradient of each label's negative score, with a dimension of size 1 for the
        classes."""
        shares = self.shares if self.weights is None else self.shares * self.weights
        return shares.unsqueeze([1])

    def by_class(self, scores: Value) -> Value | None:
        """Returns the gradient of the class weights; None if the node has none."""
        if self.weights is None:
            return None
        loss = -self.is_label.where(scores, 0.0).sum([1])
        if self.v.attr("reduction") == "mean":
            loss = loss - self.v.y
        shares = self.is_label.where((self.shares * loss).unsqueeze([1]), 0.0)
        return shares.sum([a for a in range(scores.rank) if a != 1])
