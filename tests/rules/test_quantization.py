"""Rules of quantization."""

import numpy as np
import pytest
from numpy import array

from onnxpar.rules.case import Case

X = (4, 6, 3)
Q = np.random.default_rng(0).integers(0, 255, X, np.uint8)
SCALE, ZERO = array(0.02, np.float32), array(128, np.uint8)
SCALES, ZEROS = np.linspace(0.01, 0.05, 6, dtype=np.float32), np.arange(6, dtype=np.uint8)
BLOCKS = np.linspace(0.01, 0.05, 36, dtype=np.float32).reshape(4, 3, 3)

CASES = [
    (Case("QuantizeLinear", [X, SCALE, ZERO]), "d0 d1 d2, (), () -> d0 d1 d2"),
    (Case("QuantizeLinear", [X, SCALE]), "d0 d1 d2, () -> d0 d1 d2"),
    (Case("QuantizeLinear", [X, SCALES, ZEROS], {"axis": 1}), "d0 d1 d2, d1, d1 -> d0 d1 d2"),
    (
        Case("QuantizeLinear", [X, BLOCKS], {"axis": 1, "block_size": 2}, opset=21),
        "d0 d1 d2, d0 blocks d2 -> d0 d1 d2 {whole: d1 blocks}",
    ),
    (Case("DequantizeLinear", [Q, SCALE, ZERO], fed=[0]), "d0 d1 d2, (), () -> d0 d1 d2"),
    (
        Case("DequantizeLinear", [Q, SCALES, ZEROS], {"axis": -2}, fed=[0]),
        "d0 d1 d2, d1, d1 -> d0 d1 d2",
    ),
    (
        Case("DequantizeLinear", [Q, BLOCKS], {"axis": 1, "block_size": 2}, fed=[0], opset=21),
        "d0 d1 d2, d0 blocks d2 -> d0 d1 d2 {whole: d1 blocks}",
    ),
    (
        Case("DynamicQuantizeLinear", [X], outputs=3),
        "i0_0 i0_1 i0_2 -> o0_0 o0_1 o0_2; (); () {whole: i0_0 i0_1 i0_2 o0_0 o0_1 o0_2}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
