"""Rules of normalizations that treat channels apart."""

import numpy as np
import pytest

from onnxpar.testing.case import Case

X = (2, 4, 3, 5)
VARIANCE = np.linspace(0.5, 2, 4, dtype=np.float32)
HALF = np.linspace(0.5, 2, 4, dtype=np.float16)
HALVES = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float16)
TRAINS = {"training_mode": 1, "momentum": 0.7}

CASES = [
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
        "d0 d1 d2 d3, d1, d1, d1, d1 -> d0 d1 d2 d3; d1; d1 {communicating: d0 d2 d3}",
    ),
    (
        Case("InstanceNormalization", [X, (4,), (4,)]),
        "d0 d1 d2 d3, d1, d1 -> d0 d1 d2 d3 {communicating: d2 d3}",
    ),
    (
        Case("InstanceNormalization", [(2, 4, 6), (4,), (4,)]),
        "d0 d1 d2, d1, d1 -> d0 d1 d2 {communicating: d2}",
    ),
    (
        Case("GroupNormalization", [(2, 6, 5), (6,), (6,)], {"num_groups": 3}, opset=21),
        "n (g c) h0, (g c), (g c) -> n (g c) h0 {communicating: c h0}",
    ),
    (
        Case("GroupNormalization", [(2, 6, 5), (3,), (3,)], {"num_groups": 3}, opset=18),
        "n (g c) h0, g, g -> n (g c) h0 {communicating: c h0}",
    ),
    (Case("LRN", [X], {"size": 3}), "d0 d1 d2 d3 -> d0 d1 d2 d3 {communicating: d1}"),
    (
        Case("BatchNormalization", [HALVES, *[HALF] * 4], TRAINS, [0], 3),
        "d0 d1, d1, d1, d1, d1 -> d0 d1; d1; d1 {communicating: d0}",
    ),
    (
        Case("GroupNormalization", [(2, 6, 2, 2), (6,), (6,)], {"num_groups": 2}, opset=21),
        "n (g c) h0 h1, (g c), (g c) -> n (g c) h0 h1 {communicating: c h0 h1}",
    ),
    (
        Case("LRN", [(1, 7, 2, 2)], {"size": 5, "alpha": 0.5, "beta": 0.6, "bias": 1.5}),
        "d0 d1 d2 d3 -> d0 d1 d2 d3 {communicating: d1}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
