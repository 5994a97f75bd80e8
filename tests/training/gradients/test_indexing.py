"""Gradients of ops that pick and place elements by index."""

import numpy as np
import pytest
from numpy import array

from onnxpar.base.errors import ModelError
from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import Gradient, prove_gradient

RNG = np.random.default_rng(5)
X = RNG.uniform(0.5, 2, (3, 4))
ORDER = RNG.permutation(24).reshape(2, 3, 4) * 0.1
TWICE = array([[0, 2, 0, 1], [0, 2, -1, 1]])
TUPLES = array([[[0, 1], [1, -1]], [[-2, 2], [0, 1]]])
APART = array([[0, 3], [2, -3], [-2, 0]])
HOLDS = array([True, False, True])
SOME = np.random.default_rng(3).standard_normal((4, 7)) * 1.5
SOME[[0, 1, 1, 2], [2, 1, 4, 0]] = 0
"""Rows with one zero, with two, at the start and with none."""


def scattered(op, data, indices, updates, reduction, **attrs):
    operands = [data, indices, updates]
    return Case(op, operands, {"reduction": reduction, **attrs}, fed=[0, 1, 2])


CASES = [
    Case("Gather", [(5, 3), array([3, 0, 3])]),
    Case("Gather", [(2, 5), array([[-1, 0], [2, 2]])], {"axis": -1}, fed=[1]),
    Case("Gather", [(2, 5, 2), array([-4, 2, -2])], {"axis": 1}),
    Case("Gather", [(4, 2), array([2, 0, -1, 1])]),
    Case("Gather", [(4, 2), array([2, 0])]),
    Case("Gather", [(4, 2), array([0, 2])]),
    Case("Gather", [(4, 2), array([2, 0, 0, 1])]),
    Case("Gather", [(4, 2), array(-3)]),
    Case("Gather", [(4, 2), array(1)], {"axis": 1}, fed=[1]),
    Case("Gather", [(4, 2), np.zeros((0, 3), np.int64)]),
    Case("Gather", [(4, 0), array([1, 1])]),
    Case("GatherElements", [(3, 4), TWICE], fed=[1]),
    Case("GatherElements", [(2, 5, 3), RNG.integers(-3, 3, (2, 4, 2))], {"axis": -1}),
    Case("GatherElements", [(3, 4), np.zeros((0, 4), np.int64)]),
    Case("GatherND", [(2, 3, 2), TUPLES], fed=[1]),
    Case("GatherND", [(2, 3), TUPLES]),
    Case("GatherND", [(4, 3), array([[1], [-1], [1]])]),
    Case("GatherND", [(2, 4, 3), array([[1], [-1]])], {"batch_dims": 1}, fed=[1]),
    Case("GatherND", [(2, 2, 3, 2), TUPLES], {"batch_dims": 1}),
    Case("GatherND", [(2, 2, 3), array([[[0], [2]], [[1], [-1]]])], {"batch_dims": 2}),
    Case("GatherND", [(2, 3), np.zeros((0, 2), np.int64)]),
    Case("TopK", [ORDER, array([2])], {"axis": 1}, outputs=2),
    Case("TopK", [ORDER, array([3])], {"largest": 0, "sorted": 0}, outputs=2),
    Case("TopK", [ORDER, array([0])], outputs=2),
    Case("Compress", [(3, 4), HOLDS], {"axis": 0}, fed=[1]),
    Case("Compress", [(2, 5), HOLDS], {"axis": -1}),
    Case("Compress", [(2, 3), array([False, True, False, False, True])]),
    Case("Compress", [(3, 2), array([False, False, False])], {"axis": 0}, fed=[1]),
    Case("Compress", [(3, 2), array([False, True, True])], {"axis": 0}, fed=[1]),
    *(Case("Trilu", [(2, 3, 4), array(k)], {"upper": u}) for k in (-1, 2) for u in (0, 1)),
    Case("Trilu", [(3, 3)]),
    Case("Trilu", [(3, 4), array(1)], fed=[1]),
    Case("ReverseSequence", [(4, 3, 2), array([1, 4, 2])], fed=[1]),
    Case("ReverseSequence", [(3, 4), array([1, 4, 2])], {"batch_axis": 0, "time_axis": 1}),
    *(
        Case("CumSum", [(2, 3, 4), array(a)], {"exclusive": e, "reverse": r})
        for a, e, r in [(0, 0, 0), (-1, 1, 0), (1, 0, 1), (-2, 1, 1)]
    ),
    *(
        Case("CumProd", [SOME, array(1)], {"exclusive": e, "reverse": r}, fed=[0], opset=26)
        for e in (0, 1)
        for r in (0, 1)
    ),
    Case("CumProd", [(3, 1, 2), array([-2])], {"exclusive": 1}, opset=26),
    Case("CumProd", [(0, 3), array(0)], opset=26),
    Case("TensorScatter", [(2, 3, 6, 4), (2, 3, 2, 4), array([1, 3])], fed=[2], opset=24),
    Case("TensorScatter", [(2, 3, 6, 4), (2, 3, 2, 4)], opset=24),
    Case(
        "TensorScatter",
        [(2, 6, 4), (2, 3, 4), array([5, 0])],
        {"mode": "circular", "axis": 1},
        fed=[2],
        opset=24,
    ),
    Case("TensorScatter", [(2, 6, 4), (2, 0, 4), array([3, 0])], {"axis": 1}, opset=24),
    Case("CumSum", [(2, 0), array(1)]),
    Case("CumSum", [(3, 2), array(0)], fed=[1]),
    scattered("ScatterElements", (3, 4), TWICE[:, :2] * [[1, 1], [-1, 1]], (2, 2), "add"),
    scattered("ScatterElements", (3, 4), TWICE, (2, 4), "add"),
    scattered("ScatterElements", X, TWICE, X[:2] + 1, "mul"),
    scattered("ScatterElements", X * (X < 1), TWICE, (X[:2] + 1) * (X[1:] < 1.5), "mul"),
    scattered("ScatterElements", X, TWICE, X[::-1][:2] + 0.3, "max"),
    scattered("ScatterElements", X, TWICE[:, :3], X[::-1][:2, :3] - 0.3, "min", axis=-1),
    scattered("ScatterElements", (2, 4), array([[3, -2], [0, 1]]), (2, 2), "none", axis=1),
    scattered("ScatterElements", (2, 4), np.zeros((0, 4), np.int64), (0, 4), "none"),
    scattered("ScatterND", (3, 4), APART, (3,), "none"),
    scattered("ScatterND", (3, 4, 2), APART, (3, 2), "add"),
    scattered("ScatterND", (4, 2), array([[2], [-4]]), (2, 2), "none"),
    scattered("ScatterND", X, array([[2], [0], [-1]]), X + 1, "mul"),
    scattered("ScatterND", X, APART, X[0, :3] + 0.3, "max"),
    scattered("ScatterND", X, array([[2], [0], [-1]]), X[::-1] - 0.3, "min"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_gradient(prove, case):
    prove(case)


def found(case):
    """The gradients of operands 0 and 2, where 1, 2, 3, ... come in."""
    gradient = Gradient(case, np.float64, [0, 2], 1)
    dy = np.arange(gradient.whole["y0"].size).reshape(gradient.whole["y0"].shape) + 1.0
    gradient.seeds = lambda: {"dy0": dy}
    gradients = gradient.run()
    return gradients["d0"].tolist(), gradients["d2"].tolist()


def test_equal_ones_share_what_comes_to_the_largest():
    """As in PyTorch's scatter_reduce."""
    at, updates = array([1, 1, 3, 0]), array([5.0, 5.0, 1.0, 2.0])
    case = scattered("ScatterElements", array([2.0, 5.0, 7.0, 0.0]), at, updates, "max")
    assert found(case) == ([0.5, 2 / 3, 3, 0], [2 / 3, 2 / 3, 4, 0.5])


def test_several_zeros_in_a_product():
    at, updates = array([1, 1, 3, 0]), array([0.0, 0.0, 4.0, 3.0])
    case = scattered("ScatterElements", array([0.0, 5.0, 7.0, 2.0]), at, updates, "mul")
    assert found(case) == ([3, 0, 3, 16], [0, 0, 8, 0])


def test_top_k_whose_indices_nobody_reads(prove):
    indices = Case("TopK", [ORDER, array([2])], outputs=2)
    prove(indices, wrt=[0])


def test_a_product_along_an_axis_that_is_fed():
    with pytest.raises(ModelError, match="make the axis a constant"):
        prove_gradient(Case("CumProd", [(2, 3), array(0)], fed=[1], opset=26))
