"""Rules of ops that move elements."""

import pytest
from numpy import array

from onnxpar.testing.case import Case

X = (4, 6, 5)

CASES = [
    (Case("Transpose", [X], {"perm": [2, 0, 1]}), "d0 d1 d2 -> d2 d0 d1"),
    (Case("Transpose", [X]), "d0 d1 d2 -> d2 d1 d0"),
    (Case("Reshape", [X, array([4, 2, 3, 5])]), "f0 (f1 f2) f3, _ -> f0 f1 f2 f3"),
    (Case("Reshape", [X, array([0, -1])]), "f0 f1 f2, _ -> f0 (f1 f2)"),
    (Case("Reshape", [X, array([24, 5])]), "f0 f1 f2, _ -> (f0 f1) f2"),
    (
        Case("Reshape", [X, array([6, 4, 5])]),
        "(f0 w1) w2 w3, _ -> (f0 w4) w5 w6 {whole: w1 w2 w3 w4 w5 w6}",
    ),
    (Case("Reshape", [(4, 1, 6), array([1, 4, 6, 1])]), "f0 1 f1, _ -> 1 f0 f1 1"),
    (Case("Reshape", [(1, 1), array([1])]), "1 1, _ -> 1"),
    (Case("Flatten", [X], {"axis": 2}), "f0 f1 f2 -> (f0 f1) f2"),
    (Case("Flatten", [X], {"axis": 0}), "f0 f1 f2 -> 1 (f0 f1 f2)"),
    (Case("Squeeze", [(4, 1, 5, 1), array([1, -1])]), "f0 1 f1 1, _ -> f0 f1"),
    (Case("Squeeze", [(2, 1, 5, 1)]), "f0 1 f1 1 -> f0 f1"),
    (Case("Unsqueeze", [X, array([0, 3])]), "f0 f1 f2, _ -> 1 f0 f1 1 f2"),
    (Case("Expand", [(4, 1, 5), array([3, 1, 6, 1])]), "d1 1 d3, _ -> d0 d1 d2 d3"),
    (Case("Expand", [(4, 5), array([1])]), "d0 d1, _ -> d0 d1"),
    (Case("Tile", [(2, 5), array([3, 1])]), "d0 d1, _ -> (r0 d0) d1"),
    (Case("Tile", [(2, 3), array([2, 3])]), "d0 d1, _ -> (r0 d0) (r1 d1)"),
    (Case("ConstantOfShape", [array([4, 1, 5])]), "_ -> d0 1 d2"),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
