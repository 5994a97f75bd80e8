"""Gradients of activation functions."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import Gradient

RNG = np.random.default_rng(5)
X = RNG.uniform(-4, 4, (2, 3, 4))
X[np.abs(X) < 0.01] = 1.0
MICROSOFT = "com.microsoft"


def each(ops, operands):
    """Cases of several ops with the same operands."""
    return [Case(op, operands) for op in ops.split()]


CASES = [
    *each("Relu LeakyRelu Elu Selu Celu Sigmoid HardSigmoid", [X]),
    *each("Softplus Softsign HardSwish ThresholdedRelu Mish", [X]),
    *each("Relu LeakyRelu Elu Celu HardSwish Mish Gelu", [(0, 3)]),
    *each("Relu LeakyRelu Elu Celu HardSwish Mish Gelu", [array(-0.7)]),
    Case("LeakyRelu", [X], {"alpha": -0.3}),
    Case("Elu", [X], {"alpha": 1.7}),
    Case("Selu", [X], {"alpha": 1.3, "gamma": 0.6}),
    Case("Celu", [X], {"alpha": 2.5}),
    Case("HardSigmoid", [X], {"alpha": 0.4, "beta": 0.3}),
    Case("ThresholdedRelu", [X], {"alpha": -0.5}),
    Case("Swish", [X], opset=24),
    Case("Swish", [X], {"alpha": 1.7}, opset=24),
    *(Case("PRelu", [X, shape]) for shape in [(2, 3, 4), (4,), (3, 1), (1,), ()]),
    Case("Gelu", [X]),
    Case("Gelu", [X], {"approximate": "tanh"}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_gradient(prove, case):
    prove(case)


@pytest.mark.parametrize(
    ("case", "same"),
    [
        (Case("QuickGelu", [X], domain=MICROSOFT), Case("Swish", [X], {"alpha": 1.702}, opset=24)),
        (
            Case("QuickGelu", [X], {"alpha": 0.5}, domain=MICROSOFT),
            Case("Swish", [X], {"alpha": 0.5}, opset=24),
        ),
        (Case("Gelu", [X], domain=MICROSOFT), Case("Gelu", [X])),
        (Case("FastGelu", [X], domain=MICROSOFT), Case("Gelu", [X], {"approximate": "tanh"})),
    ],
    ids=["QuickGelu", "QuickGelu", "Gelu", "FastGelu"],
)
def test_the_runtimes_own_as_the_standards(case, same):
    found, expected = (Gradient(c, np.float32, None, 1).run()["d0"] for c in (case, same))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("op", "attrs"), [("BiasGelu", {}), ("FastGelu", {"approximate": "tanh"})])
def test_bias_of_gelu(op, attrs):
    bias = array([0.3, -0.2, 0.1, 1.0])
    found = Gradient(Case(op, [X, bias], domain=MICROSOFT), np.float32, [0, 1], 1)
    shifted = X.astype(np.float32) + bias.astype(np.float32)
    whole = Gradient(Case("Gelu", [shifted], attrs), np.float32, None, 1).run()["d0"]
    np.testing.assert_array_equal(found.run()["d0"], whole)
    np.testing.assert_allclose(found.run()["d1"], whole.sum((0, 1)), rtol=1e-5)


SLOPES = [
    (Case("Relu", [array([0.0])]), [0]),
    (Case("LeakyRelu", [array([0.0])], {"alpha": 0.1}), [0.1]),
    (Case("Elu", [array([0.0])], {"alpha": 0.5}), [0.5]),
    (Case("ThresholdedRelu", [array([1.0])]), [0]),
    (Case("HardSigmoid", [array([-2.5, 2.5])]), [0, 0]),
    (Case("HardSwish", [array([-3.0, 3.0])]), [0, 1]),
    (Case("Shrink", [array([-0.6, -0.5, -0.4, 0.5, 0.6])]), [1, 0, 0, 0, 1]),
    (Case("Shrink", [array([-1.6, -1.4, 1.4, 1.6])], {"lambd": 1.5, "bias": 0.7}), [1, 0, 0, 1]),
    (Case("PRelu", [array([0.0]), array([0.3])]), [0.3]),
]


@pytest.mark.parametrize(("case", "slopes"), SLOPES, ids=lambda c: getattr(c, "op", ""))
def test_kinks_are_pytorchs(case, slopes):
    """Shrink has float32 inside in onnxruntime, of which differences can tell nothing."""
    gradient = Gradient(case, np.float32, None, 1)
    np.testing.assert_allclose(gradient.run()["d0"], slopes * gradient.seeds()["dy0"], rtol=1e-6)


FAR = {
    "Relu Softplus HardSwish Mish Gelu Elu Celu": (0.0, 1.0),
    "Sigmoid Softsign HardSigmoid": (0.0, 0.0),
    "LeakyRelu": (0.01, 1.0),
    "Selu": (0.0, 1.05070102214813232421875),
}
FAR_CASES = [(op, {}, *ends) for ops, ends in FAR.items() for op in ops.split()]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("op", "attrs", "low", "high"), [*FAR_CASES, ("Gelu", {"approximate": "tanh"}, 0.0, 1.0)]
)
def test_nothing_overflows_far_out(op, attrs, low, high, dtype):
    if op == "Celu" and dtype is np.float16:
        pytest.skip("the standard has it in float32 alone")
    far = array([-30000.0, -1000.0, -100.0, 100.0, 1000.0, 30000.0])
    gradient = Gradient(Case(op, [far], attrs), dtype, None, 1)
    expected = np.repeat([low, high], 3) * gradient.seeds()["dy0"]
    np.testing.assert_allclose(gradient.run()["d0"], expected, rtol=2e-3, atol=3e-4)
