"""Gradients of activation functions as PyTorch's, kinks included."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

torch = pytest.importorskip("torch")
F = torch.nn.functional

X = np.concatenate([np.arange(-6, 6.5, 0.5), [-100, 100]])
FUNCTIONS = {
    "Relu": ({}, F.relu),
    "LeakyRelu": ({"alpha": 0.1}, lambda x: F.leaky_relu(x, 0.1)),
    "Elu": ({"alpha": 0.5}, lambda x: F.elu(x, 0.5)),
    "Selu": ({}, F.selu),
    "Celu": ({"alpha": 2.0}, lambda x: F.celu(x, 2.0)),
    "Sigmoid": ({}, torch.sigmoid),
    "HardSigmoid": ({"alpha": 1 / 6, "beta": 0.5}, F.hardsigmoid),
    "HardSwish": ({}, F.hardswish),
    "Softplus": ({}, F.softplus),
    "Softsign": ({}, F.softsign),
    "ThresholdedRelu": ({"alpha": 1.5}, lambda x: F.threshold(x, 1.5, 0.0)),
    "Mish": ({}, F.mish),
    "Shrink": ({"lambd": 0.5, "bias": 0.5}, F.softshrink),
    "Gelu": ({}, F.gelu),
}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_gradient(agree, op):
    attrs, function = FUNCTIONS[op]
    x = np.where(X == 0, 1, X) if op == "Elu" else X  # PyTorch's is that of 1 at 0 alone
    if op == "HardSigmoid":
        x = np.where(np.abs(x) == 3, 1, x)  # 1 / 6 is inexact
    agree(Case(op, [x], attrs), function)


def test_others(agree):
    agree(Case("Gelu", [X], {"approximate": "tanh"}), lambda x: F.gelu(x, approximate="tanh"))
    agree(Case("Swish", [X], opset=24), F.silu)
    rows = X[:24].reshape(2, 3, 4)
    slopes = array([0.1, -0.2, 0.3])
    agree(Case("PRelu", [rows, slopes[:, None]]), lambda x, s: F.prelu(x, s[:, 0]), wrt=[0, 1])


def test_clip_and_extremes(agree):
    a, b = array([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]]), array([[1.0, 3.0, 2.0], [0.0, 3.0, 4.0]])
    for op, function, reduced in [
        ("Max", torch.maximum, torch.amax),
        ("Min", torch.minimum, torch.amin),
    ]:
        agree(Case(op, [a, b]), function, wrt=[0, 1])
        agree(Case(f"Reduce{op}", [a, array([1])], {"keepdims": 0}), lambda x, f=reduced: f(x, 1))
    for low, high in [(1.0, 2.0), (2.0, 1.0), (0.0, 3.0)]:
        bounds = [array(low), array(high)]
        agree(Case("Clip", [a, *bounds]), torch.clamp, wrt=[0, 1, 2])
        agree(Case("Clip", [a, bounds[0]]), lambda x, m: torch.clamp(x, min=m), wrt=[0, 1])


def test_powers(agree):
    base, exponent = array([0.0, 0.0, 2.0, 0.5, -2.0]), array([2.0, 0.0, -1.5, 0.0, 3.0])
    agree(Case("Pow", [base, exponent]), lambda b: torch.pow(b, torch.from_numpy(exponent)))
    agree(Case("Pow", [base[:4], exponent[:4]]), torch.pow, wrt=[0, 1])
