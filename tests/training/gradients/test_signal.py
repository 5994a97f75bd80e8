"""Gradients of Fourier transforms."""

import pytest
from numpy import array

from onnxpar.base.errors import ModelError
from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import prove_gradient


def transformed(shape, length=None, axis=None, fed=(), **attrs):
    operands = [shape] + [None if n is None else array(n) for n in (length, axis)]
    while operands[-1] is None:  # onnxruntime crashes on an axis that is left out by name
        operands.pop()
    return Case("DFT", operands, attrs, fed=fed)


def short(signal, step, window=None, length=None, fed=(), **attrs):
    length = None if length is None else array(length)
    return Case("STFT", [signal, array(step), window, length], attrs, fed=fed)


CASES = [
    transformed((2, 4, 2)),
    transformed((2, 5, 1)),
    transformed((3, 4, 2, 1), axis=0),
    transformed((2, 4, 2), length=7, axis=-2),
    transformed((2, 5, 2), length=3, axis=1),
    transformed((2, 4, 2), inverse=1),
    transformed((2, 4, 1), length=6, inverse=1),
    transformed((2, 8, 1), onesided=1),
    transformed((2, 5, 1), onesided=1),
    transformed((2, 5, 1), length=8, onesided=1),
    transformed((2, 5, 1), length=3, onesided=1),
    transformed((2, 5, 2), onesided=1, inverse=1),
    transformed((2, 5, 2), length=9, onesided=1, inverse=1),
    transformed((2, 5, 3, 2), length=8, axis=1, onesided=1, inverse=1),
    Case("DFT", [(2, 5, 1)], {"onesided": 1}, opset=18),
    Case("DFT", [(2, 3, 4, 2), array(6)], {"axis": -2, "inverse": 1}, opset=18),
    short((2, 9, 1), 2, (4,)),
    short((2, 9), 2, (5,)),
    short((2, 9, 1), 3, None, 4, onesided=0),
    short((1, 8, 1), 4, (4,), 4),
    short((2, 9, 2), 1, (4,), onesided=0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}{c.operands[0]}")
def test_gradient(prove, case):
    prove(case)


@pytest.mark.parametrize(
    "case", [transformed((2, 5, 1), length=8, fed=[1]), short((2, 9, 1), 2, None, 4, fed=[3])]
)
def test_a_length_that_only_a_run_can_tell(case):
    with pytest.raises(ModelError, match=r"is not constant; make 'x[13]' an initializer"):
        prove_gradient(case)


@pytest.mark.parametrize("length", [7, 10])
def test_frequencies_of_another_length(length):
    case = transformed((2, 5, 2), length=length, onesided=1, inverse=1)
    with pytest.raises(ModelError, match="runtimes do not agree"):
        prove_gradient(case)
