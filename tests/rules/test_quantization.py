"""Rules of quantization."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

X = (4, 6, 3)
Q = np.random.default_rng(0).integers(0, 255, X, np.uint8)
SCALE, ZERO = array(0.02, np.float32), array(128, np.uint8)
SCALES, ZEROS = np.linspace(0.01, 0.05, 6, dtype=np.float32), np.arange(6, dtype=np.uint8)
BLOCKS = np.linspace(0.01, 0.05, 36, dtype=np.float32).reshape(4, 3, 3)

RAGGED = np.linspace(0.01, 0.05, 24, dtype=np.float32).reshape(4, 2, 3)
DRAWN = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
RANGES = [DRAWN, np.abs(DRAWN), -np.abs(DRAWN) - 3, DRAWN * 0, DRAWN * 1e-3 + 40, DRAWN * 1e4]
RANGE = "d0 d1 -> d0 d1; (); () {communicating: d0 d1}"

CASES = [
    (Case("QuantizeLinear", [X, SCALE, ZERO]), "d0 d1 d2, (), () -> d0 d1 d2"),
    (Case("QuantizeLinear", [X, SCALE]), "d0 d1 d2, () -> d0 d1 d2"),
    (Case("QuantizeLinear", [X, SCALES, ZEROS], {"axis": 1}), "d0 d1 d2, d1, d1 -> d0 d1 d2"),
    (
        Case("QuantizeLinear", [X, BLOCKS], {"axis": 1, "block_size": 2}, opset=21),
        "d0 (n b) d2, d0 n d2 -> d0 (n b) d2 {whole: b}",
    ),
    (Case("DequantizeLinear", [Q, SCALE, ZERO], fed=[0]), "d0 d1 d2, (), () -> d0 d1 d2"),
    (
        Case("DequantizeLinear", [Q, SCALES, ZEROS], {"axis": -2}, fed=[0]),
        "d0 d1 d2, d1, d1 -> d0 d1 d2",
    ),
    (
        Case("DequantizeLinear", [Q, BLOCKS], {"axis": 1, "block_size": 2}, fed=[0], opset=21),
        "d0 (n b) d2, d0 n d2 -> d0 (n b) d2 {whole: b}",
    ),
    (
        Case("DequantizeLinear", [Q, RAGGED], {"axis": 1, "block_size": 4}, fed=[0], opset=21),
        "d0 d1 d2, d0 n d2 -> d0 d1 d2 {whole: d1 n}",
    ),
    (
        Case("QuantizeLinear", [X, SCALES, ZEROS], {"axis": 1}, domain="com.microsoft"),
        "d0 d1 d2, d1, d1 -> d0 d1 d2",
    ),
    (Case("DynamicQuantizeLinear", [(7,)], outputs=3), "d0 -> d0; (); () {communicating: d0}"),
    *((Case("DynamicQuantizeLinear", [x], fed=[0], outputs=3), RANGE) for x in RANGES),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
