"""Gradients of reductions and of the softmax family."""

import numpy as np
import pytest
from gradient_programs import Program
from numpy import array

from onnxpar.base.errors import ModelError
from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import Gradient

RNG = np.random.default_rng(11)
X = RNG.uniform(0.3, 2, (2, 3, 4))
SIGNED = np.where(RNG.random(X.shape) < 0.5, -X, X)
SUMS = "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare"
LOGS = "ReduceLogSum ReduceLogSumExp"
ZEROS = array([[0.0, 2.0, 3.0], [0.0, 5.0, 0.0], [1.0, 2.0, -3.0]])


def each(ops, *operands, **attrs):
    """Cases of several ops with the same operands; logarithms get what is positive."""
    return [
        Case(op, [X if o is SIGNED and op == "ReduceLogSum" else o for o in operands], attrs)
        for op in ops.split()
    ]


def axes(*of):
    """Axes as an operand."""
    return array(of, np.int64)


ALL = f"{SUMS} {LOGS}"
CASES = [
    *each(ALL, SIGNED),
    *each(ALL, SIGNED, keepdims=0),
    *each(ALL, SIGNED, axes(1)),
    *each(ALL, SIGNED, axes(-1, 0), keepdims=0),
    *each(ALL, SIGNED, axes(), keepdims=0),
    *each(ALL, SIGNED, None, noop_with_empty_axes=1),
    *each(ALL, SIGNED, axes(), noop_with_empty_axes=1, keepdims=0),
    *each(ALL, SIGNED, axes(2), noop_with_empty_axes=1),
    *each(ALL, (2, 0, 3), axes(1)),
    *each(ALL, (2, 0, 3), axes(0), keepdims=0),
    *each(ALL, array(1.5)),
    Case("ReduceProd", [ZEROS, axes(1)]),
    Case("ReduceProd", [ZEROS, axes(0)], {"keepdims": 0}),
    Case("ReduceProd", [ZEROS]),
    Case("ReduceProd", [ZEROS, axes()], {"noop_with_empty_axes": 1}),
    *(
        Case(op, [shape], attrs)
        for op in ("Softmax", "LogSoftmax")
        for shape in [(2, 3, 4), (2, 0, 3), (2, 3, 0)]
        for attrs in [{}, {"axis": 1}, {"axis": -3}]
    ),
    Case("Hardmax", [SIGNED]),
    Case("Hardmax", [SIGNED], {"axis": 0}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_gradient(prove, case):
    prove(case)


POINTS = [  # at ties and kinks, as in PyTorch
    (
        Case("ReduceMax", [array([[1.0, 2.0, 2.0], [3, 3, 3]]), axes(1)]),
        [[0, 0.5, 0.5], [1 / 3] * 3],
    ),
    (Case("ReduceMin", [array([[1.0, 2.0, 1.0]])]), [[0.5, 0, 0.5]]),
    (Case("ReduceL1", [array([0.0, -2.0])]), [0, -1]),
    (Case("ReduceL2", [array([[0.0, 0.0], [3.0, -4.0]]), axes(1)]), [[0, 0], [0.6, -0.8]]),
    (Case("ReduceProd", [array([0.0, 2.0, 3.0])]), [6, 0, 0]),
    (Case("ReduceProd", [array([0.0, 0.0, 3.0])]), [0, 0, 0]),
    (Case("ReduceLogSumExp", [array([1000.0, 1000.0, -1000.0])]), [0.5, 0.5, 0]),
    (Case("ReduceLogSumExp", [array([0.0, -np.inf])]), [1, 0]),
    (Case("ReduceLogSum", [array([1e-30, 3e-30])]), [0.25e30, 0.25e30]),
]


@pytest.mark.parametrize(("case", "slopes"), POINTS, ids=lambda c: getattr(c, "op", ""))
def test_ties_and_kinks(case, slopes):
    gradient = Gradient(case, np.float32, None, 1)
    gradient.seeds = lambda: {"dy0": np.ones_like(gradient.whole["y0"])}
    np.testing.assert_allclose(gradient.run()["d0"], slopes, rtol=1e-5)


def test_softmax_of_what_is_masked():
    x = array([[1.0, -np.inf, 2.0]])
    for op in ("Softmax", "LogSoftmax"):
        found = Gradient(Case(op, [x]), np.float32, None, 1)
        whole = Gradient(Case(op, [x[:, ::2]]), np.float32, None, 1)
        seeds = found.seeds()["dy0"] * [1, op == "Softmax", 1]
        found.seeds = lambda dy=seeds: {"dy0": dy.astype(np.float32)}
        whole.seeds = lambda dy=seeds: {"dy0": dy[:, ::2].astype(np.float32)}
        np.testing.assert_allclose(found.run()["d0"][:, ::2], whole.run()["d0"], rtol=1e-5)
        assert found.run()["d0"][0, 1] == 0


def test_axes_that_are_fed_are_refused():
    with pytest.raises(ModelError, match=r"ReduceSum 'node' .* its axes .* make 'x1' an init"):
        Gradient(Case("ReduceSum", [X, axes(1)], fed=[1]), np.float32, [0], 1)


def test_softmax_of_a_row_that_the_model_replaces(tmp_path):
    program = Program(
        tmp_path,
        """safe (double[3,4] x, double[3,4] mask) => (double[3,4] y) <double zero = {0}>
        { z = Add(x, mask)  s = Softmax(z)  n = IsNaN(s)  y = Where(n, zero, s) }""",
    )
    mask = np.where(np.tri(3, 4, -1, dtype=bool), 0, -np.inf)
    found, other = (program.run(x=x, mask=mask)["x"] for x in (X[0], X[0] + 1))
    assert not found[0].any() and found[2].any()
    np.testing.assert_allclose(found[:, 2:], 0)
    np.testing.assert_allclose(found, other)
    np.testing.assert_allclose(found.sum(1), 0, atol=1e-15)
