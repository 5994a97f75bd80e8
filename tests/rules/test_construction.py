"""Rules of ops that make tensors from sizes and positions."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

CASES = [
    (Case("Trilu", [(2, 4, 5)]), "d0 d1 d2 -> d0 d1 d2"),
    (Case("Trilu", [(4, 4), array(1)], {"upper": 0}), "d0 d1, _ -> d0 d1"),
    (
        Case("OneHot", [array([[1, 0, 3], [2, 2, 0]]), array(4), array([0, 1])], fed=[0]),
        "i0 i1, _, _ -> i0 i1 o",
    ),
    (
        Case("OneHot", [array([1, -1, 3]), array(4), array([2, 7])], {"axis": 0}, fed=[0]),
        "i0, _, _ -> o i0",
    ),
    (Case("EyeLike", [(4, 5)], {"k": 1}), "m n -> m n"),
    (Case("EyeLike", [(5, 4)], {"k": -2, "dtype": 7}), "m n -> m n"),
    (Case("Trilu", [(5, 4), array(-2)], fed=[1]), "d0 d1, _ -> d0 d1"),
    (
        Case(
            "OneHot",
            [array([1, -1, 3, 9, -4]), array(4), array([2, 7], np.float32)],
            {"axis": 1},
            [0, 2],
        ),
        "i0, _, _ -> i0 o",
    ),
    (Case("Range", [array(0), array(7), array(2)]), "_, _, _ -> n"),
    (Case("Range", [array(5), array(-3), array(-2)], fed=[0, 2]), "_, _, _ -> n"),
    (Case("Range", [array(1.5), array(7.0), array(0.7)], fed=[0]), "_, _, _ -> n"),
    (
        Case("Range", [array(0, np.int16), array(7, np.int16), array(2, np.int16)]),
        "_, _, _ -> n",
    ),
    (Case("Range", [array([2]), array([9])], domain="com.microsoft"), "_, _ -> n"),
    (
        Case("Range", [array(9.0), array(1.0), array(-1.5)], domain="com.microsoft"),
        "_, _, _ -> n",
    ),
    (Case("Shape", [(4, 5)]), "i0_0 i0_1 -> o0_0 {whole: i0_0 i0_1 o0_0}"),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)


def test_size_is_taken_of_the_whole(prove_rule):
    case = Case("Size", [(4, 5)])
    prove_rule(case, "i0_0 i0_1 -> () {whole: i0_0 i0_1}", ["x0.0 -> sum", "x0.1 -> sum"])
