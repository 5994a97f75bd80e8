"""What tests of gradient rules share."""

from collections.abc import Callable

import pytest

import onnxpar.grad  # noqa: F401  (registers the rules)
from onnxpar.grad.proof import prove_gradient, prove_linear_gradient


@pytest.fixture
def prove() -> Callable[..., None]:
    """Fails where a case's gradients are wrong; see `prove_gradient`."""

    def check(case, wrt=None, results=1):
        assert prove_gradient(case, wrt, results) == []

    return check


@pytest.fixture
def prove_linear() -> Callable[..., None]:
    """The same in float32 alone; see `prove_linear_gradient`."""

    def check(case, wrt=None, results=1):
        assert prove_linear_gradient(case, wrt, results) == []

    return check
