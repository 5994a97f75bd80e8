"""Gradients of losses and reductions as PyTorch's."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

torch = pytest.importorskip("torch")
F = torch.nn.functional

RNG = np.random.default_rng(2)
LABELS = RNG.integers(0, 5, (3, 2))
WEIGHTS = RNG.uniform(0.5, 2, 5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize(
    ("op", "function"),
    [("SoftmaxCrossEntropyLoss", F.cross_entropy), ("NegativeLogLikelihoodLoss", F.nll_loss)],
)
def test_loss(agree, reduction, ignored, weights, op, function):
    for labels in (np.where(LABELS == 1, ignored, LABELS), np.full((3, 2), ignored)):
        attrs = {"reduction": reduction, "ignore_index": ignored}
        weight = None if weights is None else torch.from_numpy(weights)
        agree(
            Case(op, [RNG.standard_normal((3, 5, 2)), labels, weights], attrs, fed=[1]),
            lambda x, labels=labels, weight=weight: function(
                x, torch.from_numpy(labels), weight, reduction=reduction, ignore_index=ignored
            ),
        )


def test_reductions(agree):
    x = array([[0.0, 2.0, -3.0], [0.0, 0.0, 4.0], [1.0, -2.0, 3.0], [0.0, 0.0, 0.0]])
    for op, function in {
        "ReduceProd": lambda x: x.prod(1),
        "ReduceL1": lambda x: x.abs().sum(1),
        "ReduceL2": lambda x: torch.linalg.vector_norm(x, dim=1),
        "ReduceLogSumExp": lambda x: x.logsumexp(1),
        "ReduceMean": lambda x: x.mean(1),
    }.items():
        agree(Case(op, [x, array([1])], {"keepdims": 0}), function)
