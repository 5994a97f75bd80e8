"""Gradients of the losses that ONNX has as ops."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import Gradient

RNG = np.random.default_rng(13)
SOFTMAX, LIKELIHOOD = "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"
WEIGHTS = RNG.uniform(0.5, 2, 5)
SHAPES = {(): (4, 5), (3,): (2, 5, 3), (2, 3): (2, 5, 2, 3)}


def _labels(space, ignored=None):
    labels = RNG.integers(0, 5, (SHAPES[space][0], *space))
    if ignored is not None:
        labels.reshape(-1)[[0, 3]] = ignored
    return labels


CASES = [
    Case(op, [SHAPES[space], _labels(space, ignored), weights], attrs, fed=[1])
    for op in (SOFTMAX, LIKELIHOOD)
    for reduction in ("none", "mean", "sum")
    for space, ignored in [((), None), ((), 2), ((), -100), ((3,), -1), ((2, 3), 7), ((2, 3), None)]
    for weights in (None, WEIGHTS)
    for attrs in [{"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored})]
]


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_gradient(prove, case):
    prove(case)


def test_labels_of_the_model_and_of_32_bits(prove):
    for op in (SOFTMAX, LIKELIHOOD):
        prove(Case(op, [(4, 5), array([0, 4, 2, 2], np.int32), WEIGHTS]))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_log_probabilities_have_a_gradient_too(prove, reduction, weights):
    attrs = {"reduction": reduction, "ignore_index": -100}
    case = Case(SOFTMAX, [(2, 5, 3), _labels((3,), -100), weights], attrs, fed=[1], outputs=2)
    prove(case, results=2)


@pytest.mark.parametrize("op", [SOFTMAX, LIKELIHOOD])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_labels_that_are_all_ignored_leave_everything_as_it_is(op, reduction, weights, ignored):
    """Though the mean itself is 0 / 0, as in PyTorch."""
    attrs = {"reduction": reduction, "ignore_index": ignored}
    case = Case(op, [(3, 5), np.full(3, ignored), weights], attrs, fed=[1])
    gradient = Gradient(case, np.float32, [0], 1)
    assert np.isnan(gradient.whole["y0"]).all() == (reduction == "mean")
    np.testing.assert_array_equal(gradient.run()["d0"], np.zeros((3, 5)))


@pytest.mark.parametrize("op", [SOFTMAX, LIKELIHOOD])
@pytest.mark.parametrize("ignored", [None, 2])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_half_precision_counts_its_labels_exactly(op, ignored, weights):
    labels = RNG.integers(0, 5, (2, 40000))
    attrs = {"reduction": "mean"} | ({} if ignored is None else {"ignore_index": ignored})
    scores = RNG.standard_normal((2, 5, 40000))
    case = Case(op, [scores, labels, weights], attrs, fed=[1])
    single, half = (Gradient(case, dtype, [0], 1) for dtype in (np.float32, np.float16))
    for gradient in (single, half):
        gradient.seeds = lambda g=gradient: {"dy0": array(1024, g.whole["y0"].dtype)}
    expected = single.run()["d0"]
    np.testing.assert_allclose(half.run()["d0"], expected, atol=3e-3 * np.abs(expected).max())
