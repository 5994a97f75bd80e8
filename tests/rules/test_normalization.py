"""Rules of normalizations."""

import numpy as np
import pytest

from onnxpar.testing.case import Case

X = (2, 4, 3, 5)
RNG = np.random.default_rng(0)
HALVES = RNG.standard_normal((3, 8)).astype(np.float16) + np.float16(3)
ZEROS = np.array([[0, 0, 0], [1, -2, 3]], np.float32)
ONES = np.ones(8, np.float16)

CASES = [
    (Case("Softmax", [X]), "d0 d1 d2 d3 -> d0 d1 d2 d3 {communicating: d3}"),
    (Case("Softmax", [X], {"axis": 1}), "d0 d1 d2 d3 -> d0 d1 d2 d3 {communicating: d1}"),
    (Case("LogSoftmax", [X], {"axis": 0}), "d0 d1 d2 d3 -> d0 d1 d2 d3 {communicating: d0}"),
    (
        Case("LayerNormalization", [X, (5,), (5,)]),
        "d0 d1 d2 d3, d3, d3 -> d0 d1 d2 d3 {communicating: d3}",
    ),
    (
        Case("LayerNormalization", [X, (3, 5)], {"axis": 2}, outputs=3),
        "d0 d1 d2 d3, d2 d3 -> d0 d1 d2 d3; d0 d1 1 1; d0 d1 1 1 {communicating: d2 d3}",
    ),
    (
        Case("LayerNormalization", [X, (1,)], {"axis": -1}),
        "d0 d1 d2 d3, 1 -> d0 d1 d2 d3 {communicating: d3}",
    ),
    (
        Case("LayerNormalization", [HALVES, ONES, ONES], fed=[0], outputs=3),
        "d0 d1, d1, d1 -> d0 d1; d0 1; d0 1 {communicating: d1}",
    ),
    (
        Case("LayerNormalization", [RNG.random((3, 8)), np.ones(8)], fed=[0], outputs=3),
        "d0 d1, d1 -> d0 d1; d0 1; d0 1 {communicating: d1}",
    ),
    (
        Case("LayerNormalization", [(3, 8), (8,), None], {"epsilon": 0.5}),
        "d0 d1, d1, _ -> d0 d1 {communicating: d1}",
    ),
    (
        Case("RMSNormalization", [HALVES, ONES], fed=[0], opset=23),
        "d0 d1, d1 -> d0 d1 {communicating: d1}",
    ),
    (Case("LogSoftmax", [HALVES], fed=[0]), "d0 d1 -> d0 d1 {communicating: d1}"),
    (Case("LpNormalization", [ZEROS], {"p": 1}, fed=[0]), "d0 d1 -> d0 d1 {communicating: d1}"),
    (Case("LpNormalization", [ZEROS], fed=[0]), "d0 d1 -> d0 d1 {communicating: d1}"),
    (
        Case("RMSNormalization", [X, (5,)], opset=23),
        "d0 d1 d2 d3, d3 -> d0 d1 d2 d3 {communicating: d3}",
    ),
    (
        Case("RMSNormalization", [X, (3, 5)], {"axis": 2}, opset=23),
        "d0 d1 d2 d3, d2 d3 -> d0 d1 d2 d3 {communicating: d2 d3}",
    ),
    (
        Case("LpNormalization", [X], {"axis": 1, "p": 2}),
        "d0 d1 d2 d3 -> d0 d1 d2 d3 {communicating: d1}",
    ),
    (Case("LpNormalization", [X], {"p": 1}), "d0 d1 d2 d3 -> d0 d1 d2 d3 {communicating: d3}"),
    (
        Case("MeanVarianceNormalization", [X]),
        "d0 d1 d2 d3 -> d0 d1 d2 d3 {communicating: d0 d2 d3}",
    ),
    (
        Case("MeanVarianceNormalization", [X], {"axes": [1, 2]}),
        "d0 d1 d2 d3 -> d0 d1 d2 d3 {communicating: d1 d2}",
    ),
    (
        Case(
            "SkipLayerNormalization",
            [(2, 3, 8), (2, 3, 8), (8,), (8,), (8,)],
            {"epsilon": 1e-5},
            domain="com.microsoft",
        ),
        "d0 d1 d2, d0 d1 d2, d2, d2, d2 -> d0 d1 d2 {communicating: d2}",
    ),
    (
        Case(
            "SkipSimplifiedLayerNormalization",
            [(2, 3, 8), (2, 3, 8), (8,)],
            domain="com.microsoft",
        ),
        "d0 d1 d2, d0 d1 d2, d2 -> d0 d1 d2 {communicating: d2}",
    ),
    (
        Case(
            "SkipLayerNormalization",
            [(2, 3, 8), (3, 8), (8,)],
            {"epsilon": 0.1},
            domain="com.microsoft",
        ),
        "d0 d1 d2, d1 d2, d2 -> d0 d1 d2 {communicating: d2}",
    ),
    (
        Case(
            "SkipSimplifiedLayerNormalization",
            [(2, 3, 8), (1, 3, 8), (8,), (8,)],
            {"epsilon": 0.1},
            domain="com.microsoft",
        ),
        "d0 d1 d2, 1 d1 d2, d2, d2 -> d0 d1 d2 {communicating: d2}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
