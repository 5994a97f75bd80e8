"""Rules of normalizations."""

import numpy as np
import pytest

from onnxpar.rules.case import Case

X = (2, 4, 3, 5)
VARIANCE = np.linspace(0.5, 2, 4, dtype=np.float32)

CASES = [
    (Case("Softmax", [X]), "d0 d1 d2 d3 -> d0 d1 d2 d3 {across: d3}"),
    (Case("Softmax", [X], {"axis": 1}), "d0 d1 d2 d3 -> d0 d1 d2 d3 {across: d1}"),
    (Case("Softmax", [X], {"axis": 2}, opset=11), "d0 d1 d2 d3 -> d0 d1 d2 d3 {across: d2 d3}"),
    (Case("LogSoftmax", [X], {"axis": 0}), "d0 d1 d2 d3 -> d0 d1 d2 d3 {across: d0}"),
    (Case("LogSoftmax", [X], opset=11), "d0 d1 d2 d3 -> d0 d1 d2 d3 {across: d1 d2 d3}"),
    (Case("Hardmax", [X], {"axis": -2}), "d0 d1 d2 d3 -> d0 d1 d2 d3 {whole: d2}"),
    (Case("LayerNormalization", [X, (5,), (5,)]), "d0 d1 d2 d3, d3, d3 -> d0 d1 d2 d3 {whole: d3}"),
    (
        Case("LayerNormalization", [X, (3, 5)], {"axis": 2}, outputs=3),
        "d0 d1 d2 d3, d2 d3 -> d0 d1 d2 d3; d0 d1 1 1; d0 d1 1 1 {whole: d2 d3}",
    ),
    (
        Case("LayerNormalization", [X, (1,)], {"axis": -1}),
        "d0 d1 d2 d3, 1 -> d0 d1 d2 d3 {whole: d3}",
    ),
    (Case("RMSNormalization", [X, (5,)], opset=23), "d0 d1 d2 d3, d3 -> d0 d1 d2 d3 {whole: d3}"),
    (
        Case("RMSNormalization", [X, (3, 5)], {"axis": 2}, opset=23),
        "d0 d1 d2 d3, d2 d3 -> d0 d1 d2 d3 {whole: d2 d3}",
    ),
    (
        Case("BatchNormalization", [X, (4,), (4,), (4,), VARIANCE], fed=[4]),
        "d0 d1 d2 d3, d1, d1, d1, d1 -> d0 d1 d2 d3",
    ),
    (
        Case("BatchNormalization", [(4, 4), (4,), (4,), (4,), VARIANCE], fed=[4]),
        "d0 d1, d1, d1, d1, d1 -> d0 d1",
    ),
    (
        Case(
            "BatchNormalization", [X, (4,), (4,), (4,), VARIANCE], {"training_mode": 1}, outputs=3
        ),
        "d0 d1 d2 d3, d1, d1, d1, d1 -> d0 d1 d2 d3; d1; d1 {whole: d0 d2 d3}",
    ),
    (
        Case("InstanceNormalization", [X, (4,), (4,)]),
        "d0 d1 d2 d3, d1, d1 -> d0 d1 d2 d3 {whole: d2 d3}",
    ),
    (
        Case("InstanceNormalization", [(2, 4, 6), (4,), (4,)]),
        "d0 d1 d2, d1, d1 -> d0 d1 d2 {whole: d2}",
    ),
    (
        Case("GroupNormalization", [(2, 6, 5), (6,), (6,)], {"num_groups": 3}, opset=21),
        "n (g c) h0, (g c), (g c) -> n (g c) h0 {whole: c h0}",
    ),
    (
        Case("GroupNormalization", [(2, 6, 5), (3,), (3,)], {"num_groups": 3}, opset=18),
        "n (g c) h0, g, g -> n (g c) h0 {whole: c h0}",
    ),
    (Case("LRN", [X], {"size": 3}), "d0 d1 d2 d3 -> d0 d1 d2 d3 {whole: d1}"),
    (Case("LpNormalization", [X], {"axis": 1, "p": 2}), "d0 d1 d2 d3 -> d0 d1 d2 d3 {whole: d1}"),
    (Case("LpNormalization", [X], {"p": 1}), "d0 d1 d2 d3 -> d0 d1 d2 d3 {whole: d3}"),
    (Case("MeanVarianceNormalization", [X]), "d0 d1 d2 d3 -> d0 d1 d2 d3 {whole: d0 d2 d3}"),
    (
        Case("MeanVarianceNormalization", [X], {"axes": [1, 2]}),
        "d0 d1 d2 d3 -> d0 d1 d2 d3 {whole: d1 d2}",
    ),
    (
        Case(
            "SkipLayerNormalization",
            [(2, 3, 8), (2, 3, 8), (8,), (8,), (8,)],
            {"epsilon": 1e-5},
            domain="com.microsoft",
        ),
        "d0 d1 d2, d0 d1 d2, d2, d2, d2 -> d0 d1 d2 {whole: d2}",
    ),
    (
        Case(
            "SkipSimplifiedLayerNormalization",
            [(2, 3, 8), (2, 3, 8), (8,)],
            domain="com.microsoft",
        ),
        "d0 d1 d2, d0 d1 d2, d2 -> d0 d1 d2 {whole: d2}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
