"""Rules of ops that join and cut dimensions."""

import pytest
from numpy import array

from onnxpar.testing.case import Case

X = (4, 9, 3)

CASES = [
    (Case("Concat", [X, (4, 5, 3)], {"axis": 1}), "d0 s0 d2, d0 s1 d2 -> d0 s0 + s1 d2"),
    (Case("Concat", [X, X, X], {"axis": -1}), "d0 d1 s0, d0 d1 s1, d0 d1 s2 -> d0 d1 s0 + s1 + s2"),
    (Case("Concat", [X], {"axis": 0}), "s0 d1 d2 -> s0 d1 d2"),
    (Case("Concat", [X, (4, 0, 3)], {"axis": 1}), "d0 s0 d2, d0 s1 d2 -> d0 s0 + s1 d2"),
    (
        Case("Concat", [(1, 9, 3)] * 3, {"axis": 0}),
        "s0 d1 d2, s1 d1 d2, s2 d1 d2 -> d0 d1 d2 {whole: d0}",
    ),
    (
        Case("Split", [X], {"axis": 0, "num_outputs": 4}, outputs=4),
        "d0 d1 d2 -> s0 d1 d2; s1 d1 d2; s2 d1 d2; s3 d1 d2 {whole: d0}",
    ),
    (
        Case("Split", [X, array([2, 3, 4])], {"axis": 1}, outputs=3),
        "d0 s0 + s1 + s2 d2, _ -> d0 s0 d2; d0 s1 d2; d0 s2 d2",
    ),
    (
        Case("Split", [X], {"axis": 0, "num_outputs": 2}, outputs=2),
        "s0 + s1 d1 d2 -> s0 d1 d2; s1 d1 d2",
    ),
    (
        Case("Split", [X], {"axis": 1, "num_outputs": 2}, outputs=2),
        "d0 s0 + s1 d2 -> d0 s0 d2; d0 s1 d2",
    ),
    (
        Case("Slice", [X, array([2]), array([7]), array([1])]),
        "d0 p1 + d1 + q1 d2, _, _, _ -> d0 d1 d2",
    ),
    (
        Case("Slice", [X, array([-3, 0]), array([2**62, -1]), array([1, 0])]),
        "p0 + d0 + q0 p1 + d1 + q1 d2, _, _, _ -> d0 d1 d2",
    ),
    (
        Case("Slice", [X, array([0]), array([9]), array([1]), array([2])]),
        "d0 x1 d2, _, _, _, _ -> d0 d1 d2 {communicating: x1, co-sharded: x1 d1}",
    ),
    (
        Case("Slice", [X, array([-1]), array([-(2**62)]), array([1]), array([-1])]),
        "d0 x1 d2, _, _, _, _ -> d0 d1 d2 {communicating: x1, co-sharded: x1 d1}",
    ),
    (
        Case("Slice", [X, array([8, 0]), array([1, 2]), array([1, 2]), array([-3, 1])]),
        "d0 x1 p2 + d2 + q2, _, _, _, _ -> d0 d1 d2 {communicating: x1, co-sharded: x1 d1}",
    ),
    (
        Case("Slice", [X, array([-2]), array([0]), array([1]), array([-8])]),
        "d0 p1 + d1 + q1 d2, _, _, _, _ -> d0 d1 d2",
    ),
    (Case("Slice", [X, array([0, 1]), array([4, 9])]), "d0 p1 + d1 + q1 d2, _, _ -> d0 d1 d2"),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
