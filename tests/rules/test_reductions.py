"""Rules of reductions."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

X = (4, 6, 5)
INT = np.random.default_rng(0).integers(-9, 9, (4, 6))
LARGE = np.random.default_rng(0).integers(-(2**62), 2**62, (4, 6))
JOIN = {
    "ReduceSum": "sum",
    "ReduceMean": "sum",
    "ReduceL1": "sum",
    "ReduceSumSquare": "sum",
    "ReduceMax": "max",
    "ReduceMin": "min",
    "ReduceProd": "prod",
}
ACROSS = ["ReduceL2", "ReduceLogSum", "ReduceLogSumExp"]
INFINITE = array([[-np.inf] * 3, [1, np.inf, -np.inf], [900, 901, -np.inf]], np.float32)
POSITIVE = np.linspace(0.5, 2, 24, dtype=np.float32).reshape(4, 6)

CASES = [
    *(
        (Case(op, [POSITIVE, array([1])], fed=[0]), f"d0 d1, _ -> d0 1 {{{join}: d1}}")
        for op, join in JOIN.items()
    ),
    *(
        (
            Case(op, [X, array([-1, 0])], {"keepdims": 0}),
            f"d0 d1 d2, _ -> d1 {{{join}: d0, {join}: d2}}",
        )
        for op, join in JOIN.items()
    ),
    *(
        (Case(op, [POSITIVE, array([1])], fed=[0]), "d0 d1, _ -> d0 1 {communicating: d1}")
        for op in ACROSS
    ),
    (Case("ReduceSum", [X], {"keepdims": 0}), "d0 d1 d2 -> () {sum: d0, sum: d1, sum: d2}"),
    (Case("ReduceMean", [X]), "d0 d1 d2 -> 1 1 1 {sum: d0, sum: d1, sum: d2}"),
    (Case("ReduceSum", [X], {"noop_with_empty_axes": 1}), "d0 d1 d2 -> d0 d1 d2"),
    (
        Case("ReduceSum", [X, array([], int)], {"noop_with_empty_axes": 1}),
        "d0 d1 d2, _ -> d0 d1 d2",
    ),
    (Case("ReduceMax", [X, array([], int)]), "d0 d1 d2, _ -> 1 1 1 {max: d0, max: d1, max: d2}"),
    *(
        (Case(op, [LARGE, array([0])], fed=[0]), "d0 d1, _ -> 1 d1 {whole: d0}")
        for op in (*JOIN, *ACROSS)
        if op not in ("ReduceMax", "ReduceMin", "ReduceLogSumExp")
    ),
    (Case("ReduceMax", [LARGE, array([0])], fed=[0]), "d0 d1, _ -> 1 d1 {max: d0}"),
    (
        Case("ReduceL2", [POSITIVE.astype(np.float16)], fed=[0]),
        "d0 d1 -> 1 1 {communicating: d0 d1}",
    ),
    (
        Case("ReduceLogSumExp", [POSITIVE.astype(float)], fed=[0]),
        "d0 d1 -> 1 1 {communicating: d0 d1}",
    ),
    (
        Case("ReduceLogSumExp", [INFINITE, array([1])], fed=[0]),
        "d0 d1, _ -> d0 1 {communicating: d1}",
    ),
    (Case("ReduceMax", [INT, array([1])], fed=[0]), "d0 d1, _ -> d0 1 {max: d1}"),
    *(
        (
            Case(op, [x.reshape(4, 3, 2), array([0, -1])], {"keepdims": 0}, [0]),
            f"d0 d1 d2, _ -> d1 {{{join}: d0, {join}: d2}}",
        )
        for op, join in (("ReduceMax", "max"), ("ReduceMin", "min"))
        for x in (INT > 0, INT < 9, *(INT.astype(t) for t in "bBie"))
    ),
    (
        Case("ReduceMean", [POSITIVE.astype(np.float16), array([1])], fed=[0]),
        "d0 d1, _ -> d0 1 {sum: d1}",
    ),
    *(
        (Case(c, [v, array(1)], attrs, fed=[0], opset=o), f"d0 d1, _ -> d0 d1 {{{how}: d1}}")
        for c, o in (("CumSum", 20), ("CumProd", 26))
        for v, how in ((INT, "whole"), (POSITIVE, "communicating"))
        for attrs in ({}, {"exclusive": 1}, {"reverse": 1}, {"reverse": 1, "exclusive": 1})
    ),
    (
        Case("CumSum", [X, array(-3)], {"reverse": 1, "exclusive": 1}),
        "d0 d1 d2, _ -> d0 d1 d2 {communicating: d0}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)


def test_powers_of_integers_are_rounded_on_the_way(prove_rule):
    case = Case("ReduceLogSumExp", [INT, array([1])], fed=[0])
    prove_rule(case, "d0 d1, _ -> d0 1 {whole: d1}", ["x0.1 -> max"])
