"""Rules of ops that compare elements along an axis."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

X = (4, 6, 5)
NAN, INF = np.nan, np.inf
TIES = array([[1, 3, 3, 0, 3], [2, 2, 2, 2, 2]], np.float32)
ODD = array(
    [[NAN, 1, NAN, 5, 5], [NAN] * 5, [1, NAN, -INF, NAN, 0], [-INF] * 5, [INF, NAN, 2, INF, 0]],
    np.float32,
)
DTYPES = (np.float16, np.int8, np.int32, np.int64)

CASES = [
    (Case("ArgMax", [X], {"axis": 1}), "d0 d1 d2 -> d0 1 d2 {communicating: d1}"),
    (Case("ArgMin", [X], {"axis": -1, "keepdims": 0}), "d0 d1 d2 -> d0 d1 {communicating: d2}"),
    *(
        (
            Case(op, [values.astype(dtype)], {"axis": 1, "select_last_index": last}, [0]),
            "d0 d1 -> d0 1 {communicating: d1}",
        )
        for op, values in (("ArgMax", TIES), ("ArgMin", -TIES))
        for dtype in DTYPES
        for last in (0, 1)
    ),
    (Case("ArgMax", [ODD], {"axis": 1}, [0]), "d0 d1 -> d0 1 {communicating: d1}"),
    (Case("ArgMin", [-ODD], {"axis": 1}, [0]), "d0 d1 -> d0 1 {communicating: d1}"),
    (
        Case("ArgMax", [ODD.T.copy()], {"axis": 0, "keepdims": 0, "select_last_index": 1}, [0]),
        "d0 d1 -> d1 {communicating: d0}",
    ),
    (Case("Hardmax", [(2, 4, 3)], {"axis": -2}), "d0 d1 d2 -> d0 d1 d2 {communicating: d1}"),
    (Case("Hardmax", [TIES], fed=[0]), "d0 d1 -> d0 d1 {communicating: d1}"),
    # in rows of other lengths, onnxruntime's result for a NaN depends on the memory of the row
    (Case("Hardmax", [ODD[:, :4]], fed=[0]), "d0 d1 -> d0 d1 {communicating: d1}"),
    *(
        (
            Case("TopK", [X, array([k])], {"axis": 1, "largest": largest}, outputs=2),
            "d0 d1 d2, _ -> d0 k d2; d0 k d2 {communicating: d1, whole: k}",
        )
        for k, largest in ((2, 1), (4, 0), (6, 1))
    ),
    *(
        (
            Case("TopK", [TIES.astype(d), array([3])], {"largest": largest}, [0], 2),
            "d0 d1, _ -> d0 k; d0 k {communicating: d1, whole: k}",
        )
        for d in DTYPES
        for largest in (0, 1)
    ),
    (
        Case("TopK", [X, array([2])], fed=[1], outputs=2),
        "d0 d1 d2, _ -> d0 d1 k; d0 d1 k {whole: k d2}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
