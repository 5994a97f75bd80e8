"""Rules of ops that write updates along a dimension."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

X = (5, 4, 3)
PLACES = np.argsort(np.random.default_rng(0).random(X), axis=0)[:2]
TABLE = np.random.default_rng(1).permutation(15).reshape(5, 3)
SHORTS = TABLE.astype(np.int16)
LENGTHS = array([5, 2, 1, 3])

CASES = [
    (
        Case("ScatterElements", [X, PLACES, (2, 4, 3)], {"axis": 0}),
        "v d1 d2, i d1 d2, i d1 d2 -> v d1 d2 {whole: i}",
    ),
    (
        Case("ScatterElements", [X, PLACES, (2, 4, 3)], {"axis": 0, "reduction": "add"}, [1]),
        "v d1 d2, i d1 d2, i d1 d2 -> v d1 d2 {sum: i}",
    ),
    (
        Case("ScatterElements", [X, PLACES, (2, 4, 3)], {"axis": 0, "reduction": "mul"}),
        "v d1 d2, i d1 d2, i d1 d2 -> v d1 d2 {whole: i}",
    ),
    (
        Case("ScatterElements", [X, PLACES, (2, 4, 3)], {"axis": 0, "reduction": "max"}, [1]),
        "v d1 d2, i d1 d2, i d1 d2 -> v d1 d2 {max: i}",
    ),
    (
        Case("ScatterElements", [TABLE, TABLE[:2] % 5, TABLE[:2]], {"axis": 0}, [0, 1, 2]),
        "v d1, i d1, i d1 -> v d1 {whole: i}",
    ),
    (
        Case("ScatterElements", [SHORTS, TABLE[:2] % 5, SHORTS[:2]], {"axis": 0}, [0, 1]),
        "v d1, i d1, i d1 -> v d1 {whole: i v}",
    ),
    (
        Case("ScatterElements", [X, PLACES[:, :2], (2, 2, 3)], {"axis": 0}, [1]),
        "v d1 + r1 d2, i d1 d2, i d1 d2 -> v d1 + r1 d2 {whole: i}",
    ),
    (
        Case("ScatterElements", [X, PLACES % 3, (2, 4, 3)], {"axis": -1, "reduction": "add"}),
        "d0 + r0 d1 v, d0 d1 i, d0 d1 i -> d0 + r0 d1 v {sum: i}",
    ),
    (
        Case("TensorScatter", [(2, 3, 6, 4), (2, 3, 2, 4), array([1, 3])], fed=[2], opset=24),
        "d0 d1 d2 d3, d0 d1 u d3, d0 -> d0 d1 d2 d3 {whole: u}",
    ),
    (
        Case("TensorScatter", [(2, 3, 6, 4), (2, 3, 2, 4)], opset=24),
        "d0 d1 d2 d3, d0 d1 u d3 -> d0 d1 d2 d3 {whole: u}",
    ),
    (
        Case(
            "TensorScatter",
            [(2, 6, 4), (2, 3, 4), array([5, 4])],
            {"axis": 1, "mode": "circular"},
            [2],
            opset=24,
        ),
        "d0 d1 d2, d0 u d2, d0 -> d0 d1 d2 {whole: u}",
    ),
    (Case("ReverseSequence", [X, LENGTHS], fed=[1]), "d0 d1 d2, d1 -> d0 d1 d2 {whole: d0}"),
    (
        Case("ReverseSequence", [(4, 5, 3), LENGTHS], {"batch_axis": 0, "time_axis": 1}, [1]),
        "d0 d1 d2, d0 -> d0 d1 d2 {whole: d1}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
