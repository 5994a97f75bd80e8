"""Rules of random ops: with a seed, a split op draws what the whole one does."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

X = (4, 6)
HALF, ON = array(0.4, np.float32), array(True)
SEED = {"seed": 7.0}
TEXT = "d0 d1 -> d0 d1"
LONE = "i0_0 i0_1 -> o0_0 o0_1 {whole: i0_0 i0_1 o0_0 o0_1}"

CASES = [
    (Case("RandomNormalLike", [X], {**SEED, "mean": 3.0, "scale": 0.1}), TEXT),
    (Case("RandomUniformLike", [X], {**SEED, "dtype": 11, "low": -1.0}), TEXT),
    (Case("RandomUniformLike", [np.zeros(X, np.int64)], {**SEED, "dtype": 1}, [0]), TEXT),
    (Case("Dropout", [X, HALF, ON], {"seed": 3}), "d0 d1, _, _ -> d0 d1"),
    (Case("Dropout", [X, HALF, ON], {"seed": 3}, [2], 2), "d0 d1, _, _ -> d0 d1; d0 d1"),
    (Case("Dropout", [np.ones(X), HALF, ON], {"seed": 4}, [0, 1]), "d0 d1, _, _ -> d0 d1"),
    (Case("Bernoulli", [np.full(X, 0.5, np.float32)], SEED, [0]), LONE),
    (Case("Multinomial", [X], {**SEED, "sample_size": 3}), LONE),
    (Case("RandomNormal", [], {**SEED, "shape": [4, 6]}), " -> o0_0 o0_1 {whole: o0_0 o0_1}"),
    (Case("RandomUniform", [], {**SEED, "shape": [4]}), " -> o0_0 {whole: o0_0}"),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)


def test_without_a_seed_the_op_is_whole(rule_text):
    assert rule_text(Case("Dropout", [X, HALF, ON])).endswith("{whole: i0_0 i0_1 o0_0 o0_1}")
    assert rule_text(Case("RandomNormalLike", [X])) == LONE
