"""Rules of GatherND and ScatterND."""

from dataclasses import replace

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

X = (4, 5, 3)
MASK = np.stack(np.broadcast_arrays(np.arange(4)[:, None, None], np.arange(5)), -1)
"""(batch, position) of every element, as torch exports attention masks: (4, 1, 5, 2)."""
TAIL = MASK[:, :, 2:]
DIAGONAL = np.stack([np.arange(4)] * 2, -1)
PAIRS = array([[0, 1], [3, -1], [2, 2]])
NUMBERS = np.arange(20).reshape(4, 5)
ROWS = array([[3], [0], [-2], [3], [1], [1]])

CASES = [
    (Case("GatherND", [(4, 5), MASK]), "i0 i2, _ -> i0 i1 i2"),
    (Case("GatherND", [X, MASK]), "i0 i2 d0, _ -> i0 i1 i2 d0"),
    (Case("GatherND", [X, TAIL]), "i0 p1 + i2 + q1 d0, _ -> i0 i1 i2 d0"),
    (Case("GatherND", [X, MASK * [0, 1] + [2, 0]]), "p0 + k0 + q0 i2 d0, _ -> i0 i1 i2 d0"),
    (Case("GatherND", [(4, 4), DIAGONAL]), "i0 t1, _ -> i0 {whole: t1}"),
    (Case("GatherND", [X, PAIRS]), "t0 t1 d0, i0 w -> i0 d0 {sum: t0, sum: t1, whole: w}"),
    (Case("GatherND", [X, PAIRS], fed=[1]), "t0 t1 d0, i0 w -> i0 d0 {sum: t0, sum: t1, whole: w}"),
    (Case("GatherND", [X, array([[-2]])]), "p0 + k0 + q0 d0 d1, _ -> i0 d0 d1"),
    (Case("GatherND", [X, ROWS]), "v d0 d1, i0 1 -> i0 d0 d1 {sum: v}"),
    (Case("GatherND", [X, ROWS], fed=[1]), "v d0 d1, i0 1 -> i0 d0 d1 {sum: v}"),
    (Case("GatherND", [(4,), ROWS], fed=[1]), "v, i0 1 -> i0 {sum: v}"),
    (Case("GatherND", [(4,), ROWS]), "v, i0 1 -> i0 {sum: v}"),
    (Case("GatherND", [(6, 4), ROWS], {"batch_dims": 1}, fed=[1]), "b0 v, b0 1 -> b0 {sum: v}"),
    (
        Case("GatherND", [(6, 4, 2), ROWS[:, None]], {"batch_dims": 1}, fed=[1]),
        "b0 v d0, b0 i0 1 -> b0 i0 d0 {sum: v}",
    ),
    (
        Case("GatherND", [(3, 5, 4), PAIRS], {"batch_dims": 1}),
        "b0 t0 t1, b0 w -> b0 {sum: t0, sum: t1, whole: w}",
    ),
    (
        Case("GatherND", [(3, 5, 4, 2), PAIRS], {"batch_dims": 1}, [1]),
        "b0 t0 t1 d0, b0 w -> b0 d0 {sum: t0, sum: t1, whole: w}",
    ),
    (
        Case("GatherND", [NUMBERS % 3 == 0, PAIRS], fed=[0, 1]),
        "t0 t1, i0 w -> i0 {max: t0, max: t1, whole: w}",
    ),
    (Case("GatherND", [X, np.full((2, 2), 1)]), "p0 + k0 + q0 p1 + k1 + q1 d0, _ -> i0 d0"),
    (
        Case("ScatterND", [X, PAIRS, (3, 3)]),
        "t0 t1 d0, i0 w, i0 d0 -> t0 t1 d0 {whole: i0 w}",
    ),
    (Case("ScatterND", [(4, 5), MASK, (4, 1, 5)]), "i0 i2, _, i0 i1 i2 -> i0 i2 {whole: i1}"),
    (
        Case("ScatterND", [X, TAIL, (4, 1, 3, 3)]),
        "i0 p1 + i2 + q1 d0, _, i0 i1 i2 d0 -> i0 p1 + i2 + q1 d0 {whole: i1}",
    ),
    (
        Case("ScatterND", [X, ROWS[:3], (3, 5, 3)]),
        "t0 d0 d1, i0 w, i0 d0 d1 -> t0 d0 d1 {whole: i0 w}",
    ),
    (
        Case("ScatterND", [X, ROWS, (6, 5, 3)], {"reduction": "add"}, [1]),
        "t0 d0 d1, i0 w, i0 d0 d1 -> t0 d0 d1 {sum: i0, whole: w}",
    ),
    (
        Case("ScatterND", [NUMBERS, PAIRS, array([50, -6, 7])], {"reduction": "min"}, [0, 1, 2]),
        "t0 t1, i0 w, i0 -> t0 t1 {min: i0, whole: w}",
    ),
    (
        Case("ScatterND", [X, PAIRS, (3, 3)], {"reduction": "mul"}, [1]),
        "t0 t1 d0, i0 w, i0 d0 -> t0 t1 d0 {whole: i0 w}",
    ),
    (
        Case("ScatterND", [X, PAIRS, (3, 3)], {"reduction": "max"}, [1]),
        "t0 t1 d0, i0 w, i0 d0 -> t0 t1 d0 {max: i0, whole: w}",
    ),
    (
        Case("ScatterND", [X, np.arange(4)[:, None], X], {"reduction": "add"}),
        "i0 d0 d1, _, i0 d0 d1 -> i0 d0 d1",
    ),
    (
        Case("ScatterND", [X, np.arange(1, 3)[:, None], (2, 5, 3)]),
        "p0 + i0 + q0 d0 d1, _, i0 d0 d1 -> p0 + i0 + q0 d0 d1",
    ),
]

CONTRIB = [
    (replace(case, domain="com.microsoft"), text)
    for case, text in CASES
    if case.op == "GatherND" and not case.attrs
]
"""onnxruntime's own GatherND, which has no batch_dims."""


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("case", "text"), [*CASES, *CONTRIB], ids=[c.op for c, _ in (*CASES, *CONTRIB)]
)
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
