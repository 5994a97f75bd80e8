"""Rules of losses."""

import pytest
from numpy import array

from onnxpar.rules.case import Case

SCORES = (3, 5, 2)
LABELS = array([[0, 4], [1, 1], [3, 2]])

CASES = [
    (
        Case("NegativeLogLikelihoodLoss", [SCORES, LABELS], {"reduction": "none"}, [1]),
        "n c s0, n s0 -> n s0 {whole: c}",
    ),
    (
        Case("NegativeLogLikelihoodLoss", [SCORES, LABELS, (5,)], {"reduction": "sum"}, [1]),
        "n c s0, n s0, c -> () {sum: n, sum: s0, whole: c}",
    ),
    (
        Case("NegativeLogLikelihoodLoss", [SCORES, LABELS], fed=[1]),
        "n c s0, n s0 -> () {whole: c n s0}",
    ),
    (
        Case("SoftmaxCrossEntropyLoss", [SCORES, LABELS], {"reduction": "none"}, [1], 2),
        "n c s0, n s0 -> n s0; n c s0 {whole: c}",
    ),
    (
        Case(
            "SoftmaxCrossEntropyLoss",
            [SCORES, LABELS],
            {"reduction": "sum", "ignore_index": 1},
            [1],
        ),
        "n c s0, n s0 -> () {sum: n, sum: s0, whole: c}",
    ),
    (
        Case("SoftmaxCrossEntropyLoss", [(3, 5), LABELS[:, 0]], {"reduction": "mean"}, [1]),
        "n c, n -> () {whole: c n}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)


def test_a_pending_loss_beside_scores_is_not_expressed(prove_rule):
    case = Case("SoftmaxCrossEntropyLoss", [SCORES, LABELS], {"reduction": "sum"}, [1], 2)
    text = "n c s0, n s0 -> (); n c s0 {whole: c n s0}"
    prove_rule(case, text, ["x0.0 x1.0 -> sum concat 0", "x0.2 x1.1 -> sum concat 2"])
