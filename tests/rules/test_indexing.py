"""Rules of ops that pick elements."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

X = (7, 4, 3)
INDEX = array([[0, -1, 3], [6, 3, 2]])
TABLE = np.arange(21).reshape(7, 3)
ROW_OF_EACH = np.argsort(np.random.default_rng(0).random((2, 4, 3)), axis=0)

CASES = [
    (Case("Gather", [X, INDEX]), "v d1 d2, i0 i1 -> i0 i1 d1 d2 {sum: v}"),
    (Case("Gather", [X, INDEX], fed=[1]), "v d1 d2, i0 i1 -> i0 i1 d1 d2 {sum: v}"),
    (
        Case("Gather", [X, INDEX % 4], {"axis": 1}, fed=[1]),
        "d0 v d2, i0 i1 -> d0 i0 i1 d2 {sum: v}",
    ),
    (
        Case("Gather", [X, array([2, 0], np.int32)], {"axis": -1}),
        "d0 d1 v, i0 -> d0 d1 i0 {sum: v}",
    ),
    (
        Case("Gather", [X, array([2, 0], np.int32)], {"axis": -1}, fed=[1]),
        "d0 d1 v, i0 -> d0 d1 i0 {sum: v}",
    ),
    (Case("Gather", [X, array(2)]), "before + one + after d1 d2, _ -> d1 d2"),
    (Case("Gather", [X, array(2)], fed=[1]), "v d1 d2, () -> d1 d2 {sum: v}"),
    (Case("Gather", [X, array([-2])]), "before + one + after d1 d2, _ -> i0 d1 d2"),
    (Case("Gather", [X, array([[2, 3, 4, 5]])]), "before + i1 + after d1 d2, _ -> i0 i1 d1 d2"),
    (Case("Gather", [X, np.arange(4)], {"axis": 1}), "d0 i0 d2, _ -> d0 i0 d2"),
    (
        Case("Gather", [TABLE > 4, np.arange(6).reshape(2, 1, 3)], fed=[0]),
        "before + (i0 i2) + after d1, _ -> i0 i1 i2 d1",
    ),
    (Case("Gather", [(8, 3), np.arange(8).reshape(4, 2)]), "(i0 i1) d1, _ -> i0 i1 d1"),
    (
        Case("Gather", [(9, 3), np.arange(1, 9).reshape(4, 2)]),
        "before + (i0 i1) + after d1, _ -> i0 i1 d1",
    ),
    (Case("Gather", [TABLE, INDEX], fed=[0, 1]), "v d1, i0 i1 -> i0 i1 d1 {sum: v}"),
    (Case("Gather", [TABLE > 4, INDEX], fed=[0, 1]), "v d1, i0 i1 -> i0 i1 d1 {max: v}"),
    *(
        (Case("Gather", [TABLE.astype(d), INDEX], fed=[0, 1]), "v d1, i0 i1 -> i0 i1 d1 {sum: v}")
        for d in (np.int8, np.int16, np.float16)
    ),
    (
        Case("GatherElements", [X, ROW_OF_EACH], {"axis": 0}, fed=[1]),
        "v d1 d2, i d1 d2 -> i d1 d2 {sum: v}",
    ),
    (
        Case("GatherElements", [X, ROW_OF_EACH - 7], {"axis": 0}),
        "v d1 d2, i d1 d2 -> i d1 d2 {sum: v}",
    ),
    (
        Case("GatherElements", [X, ROW_OF_EACH[:, :2] % 3], {"axis": 0}, fed=[1]),
        "v d1 + r1 d2, i d1 d2 -> i d1 d2 {sum: v}",
    ),
    (
        Case("GatherElements", [X, ROW_OF_EACH[:, :3] - 7], {"axis": 0}),
        "v d1 + r1 d2, i d1 d2 -> i d1 d2 {sum: v}",
    ),
    (
        Case("GatherElements", [TABLE, TABLE[:, ::-1] % 3], {"axis": 1}, fed=[0, 1]),
        "d0 v, d0 i -> d0 i {sum: v}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)


def test_what_is_picked_along_is_whole(prove_rule):
    """Parts of it would do, but only a run can tell how large their results are."""
    case = Case("Compress", [X, array([1, 0, 1, 1], bool)], {"axis": 1}, fed=[1])
    prove_rule(case, "d0 v d2, c -> d0 w d2 {whole: v c w}", ["x0.1 x1.0 -> concat 1"])
    case = Case("Compress", [(4, 3), np.arange(12) % 5 > 1], fed=[1])
    prove_rule(case, "d0 d1, c -> w {whole: d0 d1 c w}", ["x0.0 x1.0 -> concat 0"])
