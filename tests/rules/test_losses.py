"""Rules of losses."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case
from onnxpar.testing.oracle import Oracle

SCORES = (3, 5, 2)
LABELS = array([[0, 4], [1, 1], [3, 2]])
WEIGHTS = np.linspace(0.5, 2, 5, dtype=np.float32)
HALVES = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float16)
UNNAMED = array([-100, 2, 4])
"""Labels of which the first is ignored, and no class at all."""

CASES = [
    *(
        (
            Case(op, [SCORES, LABELS, *weights], {"reduction": reduction, **ignored}, [1, 2]),
            f"n c s0, n s0{', c' * len(weights)} -> {loss} {{communicating: c{rows}}}",
        )
        for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
        for reduction, loss, rows in (
            ("none", "n s0", ""),
            ("sum", "()", " n s0"),
            ("mean", "()", " n s0"),
        )
        for weights, ignored in (([], {}), ([WEIGHTS], {"ignore_index": 1}))
    ),
    *(
        (
            Case("SoftmaxCrossEntropyLoss", [SCORES, LABELS], {"reduction": reduction}, [1], 2),
            f"n c s0, n s0 -> {loss}; n c s0 {{communicating: c{rows}}}",
        )
        for reduction, loss, rows in (("none", "n s0", ""), ("sum", "()", " n s0"))
    ),
    *(
        (
            Case(op, [(3, 5), UNNAMED], {"reduction": reduction, "ignore_index": -100}, [1]),
            f"n c, n -> {loss} {{communicating: c{rows}}}",
        )
        for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
        for reduction, loss, rows in (("none", "n", ""), ("mean", "()", " n"))
    ),
    (
        Case("SoftmaxCrossEntropyLoss", [HALVES, LABELS[:, 0].astype(np.int32)], {}, [0, 1], 2),
        "n c, n -> (); n c {communicating: c n}",
    ),
    (
        Case("NegativeLogLikelihoodLoss", [HALVES.astype(float), LABELS[:, 0]], {}, [0, 1]),
        "n c, n -> () {communicating: c n}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)


def test_a_label_beyond_all_classes_is_refused():
    case = Case("NegativeLogLikelihoodLoss", [(3, 4), array([0, 3, 1])], fed=[1])
    oracle = Oracle(case)
    oracle.feeds = {**oracle.feeds, "x1": array([0, 4, 1])}
    for split in oracle.splits():
        with pytest.raises(Exception, match="Out of range"):
            oracle.wrong(split)
