"""Rules of reductions."""

import numpy as np
import pytest
from numpy import array

from onnxpar.rules.case import Case

X = (4, 6, 5)
INT = np.random.default_rng(0).integers(-9, 9, (4, 6))
JOIN = {
    "ReduceSum": "sum",
    "ReduceMean": "sum",
    "ReduceL1": "sum",
    "ReduceSumSquare": "sum",
    "ReduceMax": "max",
    "ReduceMin": "min",
    "ReduceProd": "prod",
}
WHOLE = ["ReduceL2", "ReduceLogSum", "ReduceLogSumExp"]
POSITIVE = np.linspace(0.5, 2, 24, dtype=np.float32).reshape(4, 6)

CASES = [
    *(
        (Case(op, [POSITIVE, array([1])], fed=[0]), f"d0 d1, _ -> d0 1 {{{join}: d1}}")
        for op, join in JOIN.items()
    ),
    *(
        (
            Case(op, [X, array([-1, 0])], {"keepdims": 0}),
            f"d0 d1 d2, _ -> d1 {{{join}: d0, {join}: d2}}",
        )
        for op, join in JOIN.items()
    ),
    *(
        (Case(op, [X], {"axes": [1]}, opset=11), f"d0 d1 d2 -> d0 1 d2 {{{join}: d1}}")
        for op, join in JOIN.items()
    ),
    *((Case(op, [POSITIVE, array([1])], fed=[0]), "d0 d1, _ -> d0 1 {whole: d1}") for op in WHOLE),
    (
        Case("ReduceMean", [X], {"axes": [1], "keepdims": 0}, opset=17),
        "d0 d1 d2 -> d0 d2 {sum: d1}",
    ),
    (Case("ReduceSum", [X], {"keepdims": 0}), "d0 d1 d2 -> () {sum: d0, sum: d1, sum: d2}"),
    (Case("ReduceMean", [X]), "d0 d1 d2 -> 1 1 1 {sum: d0, sum: d1, sum: d2}"),
    (Case("ReduceSum", [X], {"noop_with_empty_axes": 1}), "d0 d1 d2 -> d0 d1 d2"),
    (
        Case("ReduceSum", [X, array([], int)], {"noop_with_empty_axes": 1}),
        "d0 d1 d2, _ -> d0 d1 d2",
    ),
    (Case("ReduceMax", [X, array([], int)]), "d0 d1 d2, _ -> 1 1 1 {max: d0, max: d1, max: d2}"),
    (Case("ReduceSum", [INT, array([0])], fed=[0]), "d0 d1, _ -> 1 d1 {sum: d0}"),
    (Case("ReduceMean", [INT, array([0])], fed=[0]), "d0 d1, _ -> 1 d1 {whole: d0}"),
    (Case("ReduceMax", [INT, array([1])], fed=[0]), "d0 d1, _ -> d0 1 {max: d1}"),
    (
        Case("ReduceMean", [POSITIVE.astype(np.float16), array([1])], fed=[0]),
        "d0 d1, _ -> d0 1 {sum: d1}",
    ),
    (Case("ArgMax", [X], {"axis": 1}), "d0 d1 d2 -> d0 1 d2 {whole: d1}"),
    (Case("ArgMin", [X], {"axis": -1, "keepdims": 0}), "d0 d1 d2 -> d0 d1 {whole: d2}"),
    (
        Case("TopK", [X, array([2])], {"axis": 1}, outputs=2),
        "d0 d1 d2, _ -> d0 k d2; d0 k d2 {whole: d1 k}",
    ),
    (
        Case("TopK", [X, array([5])], {"largest": 0}, outputs=2),
        "d0 d1 d2, _ -> d0 d1 k; d0 d1 k {whole: d2 k}",
    ),
    (Case("TopK", [X], {"k": 2}, outputs=2, opset=9), "d0 d1 d2 -> d0 d1 k; d0 d1 k {whole: d2 k}"),
    (Case("CumProd", [X, array(1)], opset=26), "d0 d1 d2, _ -> d0 d1 d2 {whole: d1}"),
    (Case("CumSum", [X, array(1)]), "d0 d1 d2, _ -> d0 d1 d2 {whole: d1}"),
    (
        Case("CumSum", [X, array(-3)], {"reverse": 1, "exclusive": 1}),
        "d0 d1 d2, _ -> d0 d1 d2 {whole: d0}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
