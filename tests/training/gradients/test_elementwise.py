"""Gradients of ops that work element by element."""

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from numpy import array

from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import Gradient, Program
from onnxpar.training.gradients.reverse import gradients
from onnxpar.training.gradients.value import Builder

RNG = np.random.default_rng(3)
X = RNG.uniform(0.2, 0.9, (2, 3, 4))
WIDE = RNG.uniform(1.1, 3, (2, 3, 4))
SIGNED = np.where(RNG.random((2, 3, 4)) < 0.5, -X, X)


def each(ops, operands):
    """Cases of several ops with the same operands."""
    return [Case(op, operands) for op in ops.split()]


CASES = [
    *(Case(op, [(2, 3, 4), shape]) for op in ("Add", "Sub", "Mul") for shape in [(2, 3, 4), (4,)]),
    *(Case(op, [(3, 1), (2, 1, 4)]) for op in ("Add", "Sub", "Mul", "Max", "Min", "Sum")),
    Case("Mean", [(2, 3, 4), (3, 1), (4,)]),
    *(Case(op, [()] * 2) for op in ("Add", "Mul", "Div")),
    *(Case(op, [(0, 3), (3,)]) for op in ("Add", "Sub", "Mul", "Div", "Max")),
    Case("Div", [(2, 3, 4), WIDE[0, :, :1]]),
    Case("Div", [(3, 1), WIDE]),
    Case("Mod", [SIGNED * 7, WIDE[0]], {"fmod": 1}),
    Case("Pow", [X, array(3.0)]),
    Case("Pow", [SIGNED, array([3], np.int64)]),
    Case("Pow", [X, (4,)], fed=[1]),
    Case("Pow", [array([0.0, 0.0, 2.0]), array([2.0, 1.0, 3.0])]),
    Case("Pow", [X, array([[0.0], [-1.5], [0.5]])], fed=[1]),
    *(Case("Pow", [X, array(n)]) for n in (0, 1, 2, -1)),
    *(Case(op, [(2, 3), (2, 3), (3,)]) for op in ("Sum", "Mean", "Max", "Min")),
    Case("Max", [(2, 3)]),
    Case("Where", [X > 0.5, (2, 3, 4), (3, 1)], fed=[0]),
    Case("Where", [X[0, :, 0] > 0.5, (2, 1), ()], fed=[0]),
    Case("Clip", [SIGNED, array(-0.5), array(0.4)]),
    Case("Clip", [SIGNED, None, array(0.4)]),
    Case("Clip", [SIGNED, array(-0.1)]),
    Case("Clip", [SIGNED]),
    Case("Clip", [SIGNED, array(-0.4), array(0.5)], fed=[1, 2]),
    Case("Clip", [SIGNED, None, array(0.4)], fed=[2]),
    Case("Clip", [SIGNED, array(0.3), array(-0.1)], fed=[1, 2]),
    Case("Max", [SIGNED, array(0.1), (3, 1)], fed=[1]),
    *each("Identity Neg Abs Exp Erf Sin Cos Tan Asin Acos", [SIGNED]),
    *each("Atan Sinh Cosh Tanh Asinh Atanh Reciprocal", [SIGNED]),
    *each("Sqrt Log Acosh", [WIDE]),
    *each("Floor Ceil Round Sign", [SIGNED]),
    Case("Cast", [SIGNED], {"to": 11}),
    Case("Dropout", [X, array(0.3)]),
    Case("Dropout", [X]),
    Case("Dropout", [X, array(0.3), array(False)]),
    Case("Dropout", [X, array(0.3), array(False)], fed=[2]),
    Case("CastLike", [SIGNED, array([1.0])]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_gradient(prove, case):
    prove(case)


def test_power_of_a_negative_base(prove):
    prove(Case("Pow", [SIGNED, array(2.0)]), wrt=[0])
    prove(Case("Pow", [SIGNED, array([2.0, 3.0, 1.0, 0.0])], fed=[1]), wrt=[0])


POINTS = [  # at kinks, ties and poles, as in PyTorch
    (Case("Abs", [array([0.0, -2.0])]), [[0, -1]]),
    (Case("Sqrt", [array([0.0, 4.0])]), [[np.inf, 0.25]]),
    (Case("Max", [array([1.0, 2.0]), array([1.0, 3.0])]), [[0.5, 0], [0.5, 1]]),
    (Case("Max", [array([1.0, 2.0])] * 3), [[1 / 3, 1 / 3]] * 3),
    (Case("Min", [array([1.0, 2.0]), array(1.0)]), [[0.5, 0], 1.5]),
    (Case("Clip", [array([0.0, 1.0, 2.0]), array(0.0), array(1.0)]), [[1, 1, 0], 0, 1]),
    (Case("Clip", [array([0.0, 1.0, 4.0]), array(2.0), array(1.0)]), [[0, 0, 0], 0, 3]),
    (Case("Pow", [array([0.0, 3.0]), array(0.0)]), [[0, 0], np.log(3)]),
    (Case("Pow", [array([0.0, 0.0]), array([2.0, 0.0])]), [[0, 0], [0, 0]]),
    (Case("Pow", [array([0.0]), array([0.5])]), [[np.inf], [0]]),
    (Case("Pow", [array([-2.0]), array([2.0])]), [[-4], [np.nan]]),
    (Case("Acosh", [array([1.0, 30000.0])]), [[np.inf, 1 / 30000]]),
    (Case("Asinh", [array([0.0, -30000.0])]), [[1, 1 / 30000]]),
]


@pytest.mark.parametrize(("case", "slopes"), POINTS, ids=lambda c: getattr(c, "op", ""))
def test_kinks_ties_and_poles(case, slopes):
    gradient = Gradient(case, np.float32, None, 1)
    gradient.seeds = lambda: {"dy0": np.ones_like(gradient.whole["y0"])}
    for i, slope in enumerate(slopes):
        np.testing.assert_allclose(gradient.run()[f"d{i}"], slope, rtol=1e-5, err_msg=f"d{i}")


def test_asinh_and_acosh_in_half_precision():
    for op in ("Acosh", "Asinh"):
        gradient = Gradient(Case(op, [array([3.0, 1000.0])]), np.float16, None, 1)
        expected = gradient.seeds()["dy0"] * [1 / np.sqrt(8 if op == "Acosh" else 10), 1e-3]
        np.testing.assert_allclose(gradient.run()["d0"], expected, rtol=5e-3)


@pytest.mark.parametrize("ratio", [None, 0.3])
@pytest.mark.parametrize("fed", [(), (2,), (1, 2)])
def test_dropout_drops_of_the_gradient_what_it_drops(ratio, fed):
    share = None if ratio is None else array(ratio, np.float32)
    fed = [i for i in fed if (share, True)[i - 1] is not None]
    case = Case("Dropout", [X, share, array(True)], {"seed": 3}, fed=fed)
    graph = case.graph([X.astype(np.float32)])
    x, y = graph.nodes[0].inputs[0], graph.nodes[0].outputs[0]
    x = graph.nodes[0].inputs[0] = gs.Variable("x0", np.float32, X.shape)
    graph.inputs = [x, *(t for t in graph.inputs if t.name != "x0")]
    dy = gs.Variable("dy", np.float32, X.shape)
    graph.inputs.append(dy)
    found = gradients(graph, {y.name: Builder(graph, "seed").value(dy)}, [x])["x0"]
    graph.outputs = [y, found.tensor]
    feeds = {t.name: case.values.get(t.name) for t in graph.inputs}
    feeds |= {"x0": X.astype(np.float32), "dy": SIGNED.astype(np.float32)}
    made = Program(graph, reference=False).run(feeds)
    dropped = made[y.name] == 0
    assert 0 < dropped.sum() < X.size
    expected = np.where(dropped, 0, SIGNED / (1 - (ratio or 0.5)))
    np.testing.assert_allclose(made[found.tensor.name], expected, rtol=1e-5)
