"""Rules of convolutions and pools."""

import numpy as np
import pytest
from numpy import array

from onnxpar.rules.case import Case

X = (2, 4, 6, 6)
PADDED = {"pads": [1, 1, 1, 1]}
RNG = np.random.default_rng(0)
X8, W8 = RNG.integers(0, 9, X, np.uint8), RNG.integers(0, 9, (6, 4, 3, 3), np.uint8)
ZERO, ZEROS = array(3, np.uint8), np.full(6, 3, np.uint8)
ONE, ONES, BIG = array(1, np.float32), np.ones(6, np.float32), array(4, np.float32)

CASES = [
    (
        Case("Conv", [X, (6, 4, 3, 3), (6,)], PADDED),
        "n c h0 h1, o c w0 w1, o -> n o y0 y1 {sum: c, whole: w0 w1 h0 y0 h1 y1}",
    ),
    (
        Case("Conv", [X, (6, 4, 3, 3)], {"strides": [2, 2]}),
        "n c h0 h1, o c w0 w1 -> n o y0 y1 {sum: c, whole: w0 w1 h0 y0 h1 y1}",
    ),
    (
        Case("Conv", [X, (6, 2, 3, 3), (6,)], {"group": 2, **PADDED}),
        "n (g c) h0 h1, (g o) c w0 w1, (g o) -> n (g o) y0 y1 {sum: c, whole: w0 w1 h0 y0 h1 y1}",
    ),
    (
        Case("Conv", [(2, 6, 5), (6, 1, 3), (6,)], {"group": 6}),
        "n (g c) h0, (g o) c w0, (g o) -> n (g o) y0 {sum: c, whole: w0 h0 y0}",
    ),
    (
        Case("Conv", [(2, 6, 5), (12, 1, 3)], {"group": 6, "dilations": [2]}),
        "n (g c) h0, (g o) c w0 -> n (g o) y0 {sum: c, whole: w0 h0 y0}",
    ),
    (
        Case("Conv", [(2, 12, 5), (9, 4, 1), (9,)], {"group": 3}),
        "n (g c) h0, (g o) c w0, (g o) -> n (g o) h0 {sum: c, whole: w0}",
    ),
    (
        Case("Conv", [X, (6, 4, 1, 1), (6,)]),
        "n c h0 h1, o c w0 w1, o -> n o h0 h1 {sum: c, whole: w0 w1}",
    ),
    (
        Case("Conv", [X, (6, 4, 1, 1)], {"strides": [2, 2]}),
        "n c (y0 b0) (y1 b1), o c w0 w1 -> n o y0 y1 {sum: c, whole: w0 w1 b0 b1}",
    ),
    (
        Case("Conv", [X, (6, 4, 2, 3), (6,)], {"strides": [2, 3]}),
        "n c (y0 b0) (y1 b1), o c w0 w1, o -> n o y0 y1 {sum: c, whole: w0 w1 b0 b1}",
    ),
    (
        Case("Conv", [X, (6, 4, 2, 2)], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        "n c (y0 b0) (y1 b1), o c w0 w1 -> n o y0 y1 {sum: c, whole: w0 w1 b0 b1}",
    ),
    (
        Case("Conv", [X, (6, 4, 2, 2)], {"strides": [2, 2], "pads": [1, 0, 0, 0]}),
        "n c h0 (y1 b1), o c w0 w1 -> n o y0 y1 {sum: c, whole: w0 w1 h0 y0 b1}",
    ),
    (
        Case("Conv", [X, (6, 4, 3, 3)], {"auto_pad": "SAME_LOWER"}),
        "n c h0 h1, o c w0 w1 -> n o y0 y1 {sum: c, whole: w0 w1 h0 y0 h1 y1}",
    ),
    (
        Case("ConvTranspose", [X, (4, 3, 3, 3), (3,)], {"strides": [2, 2]}),
        "n c h0 h1, c o w0 w1, o -> n o y0 y1 {sum: c, whole: w0 w1 h0 y0 h1 y1}",
    ),
    (
        Case("ConvTranspose", [X, (4, 3, 2, 2), (3,)], {"strides": [2, 2]}),
        "n c h0 h1, c o w0 w1, o -> n o (h0 b0) (h1 b1) {sum: c, whole: w0 w1 b0 b1}",
    ),
    (
        Case("ConvTranspose", [X, (4, 3, 2, 2)], {"group": 2, "strides": [2, 2]}),
        "n (g c) h0 h1, (g c) o w0 w1 -> n (g o) (h0 b0) (h1 b1) {sum: c, whole: w0 w1 b0 b1}",
    ),
    (
        Case("ConvTranspose", [X, (4, 3, 3, 3)], {"output_padding": [1, 0], "strides": [2, 2]}),
        "n c h0 h1, c o w0 w1 -> n o y0 y1 {sum: c, whole: w0 w1 h0 y0 h1 y1}",
    ),
    (
        Case("ConvTranspose", [X, (4, 3, 1, 1)]),
        "n c h0 h1, c o w0 w1 -> n o h0 h1 {sum: c, whole: w0 w1}",
    ),
    (
        Case("ConvInteger", [X8, W8], PADDED, [0, 1]),
        "n c h0 h1, o c w0 w1 -> n o y0 y1 {sum: c, whole: w0 w1 h0 y0 h1 y1}",
    ),
    (
        Case("ConvInteger", [X8, W8, ZERO, ZERO], {**PADDED, "group": 1}, [0, 1]),
        "n c h0 h1, o c w0 w1, (), () -> n o y0 y1 {sum: c, whole: w0 w1 h0 y0 h1 y1}",
    ),
    (
        Case("QLinearConv", [X8, ONE, ZERO, W8, ONE, ZERO, BIG, ZERO], PADDED, [0, 3]),
        "n c h0 h1, _, _, o c w0 w1, (), (), _, _ -> n o y0 y1 {whole: c w0 w1 h0 y0 h1 y1}",
    ),
    (
        Case(
            "QLinearConv",
            [X8, ONE, ZERO, W8[:, :2], ONES, ZEROS, BIG, ZERO, np.arange(6, dtype=np.int32)],
            {"group": 2},
            [0, 3],
        ),
        "n (g c) h0 h1, _, _, (g o) c w0 w1, (g o), (g o), _, _, (g o)"
        " -> n (g o) y0 y1 {whole: c w0 w1 h0 y0 h1 y1}",
    ),
    (
        Case("MaxPool", [X], {"kernel_shape": [3, 3], "strides": [2, 2], **PADDED}),
        "n c h0 h1 -> n c y0 y1 {whole: h0 y0 h1 y1}",
    ),
    (
        Case("MaxPool", [X], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        "n c (y0 b0) (y1 b1) -> n c y0 y1 {whole: b0 b1}",
    ),
    (
        Case("MaxPool", [X], {"kernel_shape": [3, 2], "strides": [1, 2]}, outputs=2),
        "i0_0 i0_1 i0_2 i0_3 -> o0_0 o0_1 o0_2 o0_3; o1_0 o1_1 o1_2 o1_3"
        " {whole: i0_0 i0_1 i0_2 i0_3 o0_0 o0_1 o0_2 o0_3 o1_0 o1_1 o1_2 o1_3}",
    ),
    (
        Case("AveragePool", [X], {"kernel_shape": [3, 3], "count_include_pad": 1, **PADDED}),
        "n c h0 h1 -> n c y0 y1 {whole: h0 y0 h1 y1}",
    ),
    (
        Case("AveragePool", [X], {"kernel_shape": [2, 3], "strides": [2, 3]}),
        "n c (y0 b0) (y1 b1) -> n c y0 y1 {whole: b0 b1}",
    ),
    (
        Case("AveragePool", [X], {"kernel_shape": [4, 4], "strides": [4, 4], "ceil_mode": 1}),
        "n c h0 h1 -> n c y0 y1 {whole: h0 y0 h1 y1}",
    ),
    (Case("LpPool", [X], {"kernel_shape": [3, 3]}), "n c h0 h1 -> n c y0 y1 {whole: h0 y0 h1 y1}"),
    (Case("GlobalAveragePool", [X]), "n c h0 h1 -> n c 1 1 {sum: h0, sum: h1}"),
    (Case("GlobalAveragePool", [(2, 4, 5)]), "n c h0 -> n c 1 {sum: h0}"),
    (Case("GlobalMaxPool", [X]), "n c h0 h1 -> n c 1 1 {max: h0, max: h1}"),
    (Case("GlobalLpPool", [X]), "n c h0 h1 -> n c 1 1 {whole: h0 h1}"),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
