"""Gradients of ops that make tensors from little."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import Gradient

CASES = [
    Case("OneHot", [array([1, -1, 5]), array(3), (2,)], {"axis": 0}, fed=[0]),
    Case("OneHot", [array([[1, -1]]), array(3), array([0.5, 2.0])], fed=[0, 2]),
    Case("EyeLike", [(3, 4)]),
    Case("Range", [array(0.5), array(2.6), array(0.4)], fed=[0, 1, 2]),
    Case("Range", [array(0.5), array(0.1), array(0.4)], fed=[0, 1, 2]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_gradient(prove, case):
    prove(case)


@pytest.mark.parametrize("op", ["RandomNormalLike", "RandomUniformLike", "Bernoulli"])
def test_draws_have_no_slope(op):
    found = Gradient(Case(op, [array([[0.2, 0.7]])]), np.float32, [0], 1).run()["d0"]
    assert found.shape == (1, 2) and not found.any()
