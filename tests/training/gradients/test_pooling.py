"""Gradients of pools."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import Gradient

X = (2, 3, 5, 6)
OVERLAPPING = {"kernel_shape": [3, 2], "strides": [2, 1]}
PADDED = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 1, 2]}
OVERHANGING = {"kernel_shape": [3, 2], "strides": [3, 3], "pads": [1, 1, 1, 0], "ceil_mode": 1}
DILATED = {"kernel_shape": [2, 3], "dilations": [2, 1], "pads": [1, 0, 0, 1]}
DEEP = {"kernel_shape": [2, 1, 3], "strides": [1, 2, 2], "pads": [1, 0, 1, 0, 0, 1]}
SAME = [{**OVERLAPPING, "auto_pad": auto} for auto in ("SAME_UPPER", "SAME_LOWER", "VALID")]
ALL = [OVERLAPPING, PADDED, OVERHANGING, DILATED, *SAME]
SIGNED = np.where(np.random.default_rng(0).random(X) < 0.5, -1, 1) * np.linspace(
    0.3, 2, 180
).reshape(X)

CASES = [
    *(Case("MaxPool", [X], attrs) for attrs in ALL),
    Case("MaxPool", [(2, 3, 7)], {"kernel_shape": [3], "strides": [3], "dilations": [2]}),
    Case("MaxPool", [(1, 2, 3, 4, 5)], DEEP),
    Case("MaxPool", [X], {**PADDED, "storage_order": 1}, outputs=2),
    Case("MaxPool", [(1, 2, 3, 4, 5)], {**DEEP, "storage_order": 1}),
    Case("MaxPool", [(0, 3, 5, 6)], OVERLAPPING),
    *(
        Case("AveragePool", [X], {**attrs, "count_include_pad": counts})
        for attrs in ALL
        for counts in (0, 1)
    ),
    Case("AveragePool", [X], {**OVERHANGING, "count_include_pad": 1}, opset=18),
    Case("AveragePool", [(2, 3, 7)], {"kernel_shape": [2], "strides": [3]}),
    Case("AveragePool", [(1, 2, 3, 4, 5)], {**DEEP, "count_include_pad": 1}),
    Case("AveragePool", [(2, 1, 6)], {"kernel_shape": [3], "dilations": [2], "pads": [2, 2]}),
    Case("AveragePool", [(0, 3, 5, 6)], OVERLAPPING),
    *(Case("LpPool", [SIGNED], attrs) for attrs in ALL),
    *(Case("LpPool", [SIGNED], {**PADDED, "p": p}) for p in (1, 3)),
    *(Case(op, [x]) for op in ("GlobalAveragePool", "GlobalMaxPool") for x in (X, (2, 3, 4))),
    *(Case("GlobalLpPool", [SIGNED], {"p": p}) for p in (1, 2, 3)),
    *(Case("LRN", [(2, 6, 2, 3)], {"size": n, "alpha": 0.7, "beta": 0.6}) for n in (1, 3, 5)),
    Case("LRN", [(2, 4, 3, 2)], {"size": 9, "alpha": 2.0, "bias": 1.5}),
]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_gradient(prove, case):
    prove(case)


def gradient(case):
    """The gradient by operand 0 in float32, and what flowed into the result."""
    node = Gradient(case, np.float32, None, 1)
    return node.run()["d0"], node.seeds()["dy0"]


def test_the_first_of_equal_ones_gets_it():
    x = array([[[[1.0, 2, 2], [2, 2, 0]]]])
    found, seed = gradient(Case("MaxPool", [x], {"kernel_shape": [2, 2]}, fed=[0]))
    (left, right) = seed.reshape(-1)
    np.testing.assert_allclose(found, [[[[0, left + right, 0], [0, 0, 0]]]])
    found, seed = gradient(Case("GlobalMaxPool", [x], fed=[0]))
    np.testing.assert_allclose(found, [[[[0, seed.item(), 0], [0, 0, 0]]]])


def test_half_precision():
    case = Case("MaxPool", [X], OVERLAPPING)
    half, single = (Gradient(case, t, None, 1).run()["d0"] for t in (np.float16, np.float32))
    np.testing.assert_allclose(half, single, rtol=0, atol=1e-2)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_a_norm_of_zeros_has_no_gradient(power):
    zeros = np.zeros((1, 2, 3, 4))
    for op, attrs in (("LpPool", {"kernel_shape": [2, 2]}), ("GlobalLpPool", {})):
        found, _ = gradient(Case(op, [zeros], {**attrs, "p": power}, fed=[0]))
        np.testing.assert_array_equal(found, zeros)


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("size", [5, 6, 7, 8, 9, 11])
@pytest.mark.parametrize(("width", "stride"), [(1, 3), (1, 4), (2, 4)])
def test_windows_that_leave_out_the_ends(auto, size, width, stride):
    """Wide strides, automatically padded, by less than nothing: the gradient is the transpose."""
    attrs = {"kernel_shape": [width], "strides": [stride], "auto_pad": auto}
    case = Case("AveragePool", [(1, 2, size)], attrs)
    found, seed = gradient(case)
    node = Gradient(case, np.float32, None, 1)
    np.testing.assert_allclose(
        (found * node.feeds["x0"]).sum(), (seed * node.whole["y0"]).sum(), rtol=1e-5
    )
