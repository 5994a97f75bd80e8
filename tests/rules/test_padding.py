"""The rule of Pad."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

X = (2, 4, 3, 6)

CASES = [
    (
        Case("Pad", [X, array([0, 0, 1, 1, 0, 0, 2, 0])]),
        "d0 d1 d2 d3, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case("Pad", [X, array([0, 0, 1, 1, 0, 0, 2, 0]), array(2, np.float32)]),
        "d0 d1 d2 d3, _, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case("Pad", [X, array([1, 0, 0, 1]), None, array([2, -1])], {"mode": "reflect"}),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case("Pad", [X, array([0, 0, 0, 0, 0, 0, 1, -1])], {"mode": "edge"}),
        "d0 d1 d2 d3, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case("Pad", [X, array([2, 4, 1, 5]), array(3, np.float32), array([-1, 1])]),
        "d0 d1 d2 d3, _, _, _ -> d0 y1 d2 y3 {communicating: d1 d3, co-sharded: d1 y1, co-sharded: d3 y3}",
    ),
    (
        Case(
            "Pad",
            [X, array([7, -1]), None, array([2])],
        ),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 y2 d3 {communicating: d2, co-sharded: d2 y2}",
    ),
    (
        Case(
            "Pad",
            [X, array([-1, 9]), array(1, np.float32), array([3])],
        ),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 d2 y3 {communicating: d3, co-sharded: d3 y3}",
    ),
    (
        Case("Pad", [X, array([2, 0, 1, 3]), None, array([3, 2])], {"mode": "wrap"}),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case("Pad", [X, array([5, 7, 5, 1]), None, array([3, 2])], {"mode": "edge"}),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 y2 y3 {communicating: d2 d3, co-sharded: d2 y2, co-sharded: d3 y3}",
    ),
    (
        Case("Pad", [X, array([-1, 2]), None, array([3])], {"mode": "reflect"}),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 d2 y3 {communicating: d3, co-sharded: d3 y3}",
    ),
    (
        Case("Pad", [X, array([3, -2]), None, array([3])], {"mode": "reflect"}),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 d2 y3 {communicating: d3, co-sharded: d3 y3}",
    ),
    (
        Case("Pad", [X, array([7, 2]), None, array([2])], {"mode": "wrap"}),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 y2 d3 {communicating: d2, co-sharded: d2 y2}",
    ),
    (
        Case(
            "Pad",
            [np.arange(144, dtype=np.int64).reshape(X), array([1, 2]), array(7), array([2])],
            {},
            [0],
        ),
        "d0 d1 d2 d3, _, _, _ -> d0 d1 y2 d3 {communicating: d2, co-sharded: d2 y2}",
    ),
    (Case("Pad", [X, array([0] * 8)]), "d0 d1 d2 d3, _ -> d0 d1 d2 d3"),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
