"""Rules of convolutions."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

X = (2, 4, 6, 6)
PADDED = {"pads": [1, 1, 1, 1]}
RNG = np.random.default_rng(0)
X8, W8 = RNG.integers(0, 9, X, np.uint8), RNG.integers(0, 9, (6, 4, 3, 3), np.uint8)
ZERO, ZEROS = array(3, np.uint8), np.full(6, 3, np.uint8)
ONE, ONES, BIG = array(1, np.float32), np.ones(6, np.float32), array(4, np.float32)

CASES = [
    (
        Case("Conv", [X, (6, 4, 3, 3), (6,)], PADDED),
        "n c h0 h1, o c w0 w1, o"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("Conv", [X, (6, 4, 3, 3)], {"strides": [2, 2]}),
        "n c h0 h1, o c w0 w1"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("Conv", [X, (6, 2, 3, 3), (6,)], {"group": 2, **PADDED}),
        "n (g c) h0 h1, (g o) c w0 w1, (g o)"
        " -> n (g o) y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("Conv", [(2, 6, 5), (6, 1, 3), (6,)], {"group": 6}),
        "n (g c) h0, (g o) c w0, (g o) -> n (g o) y0 {sum: c, communicating: h0, co-sharded: h0 y0, whole: w0}",
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
        "n c h0 h1, o c w0 w1"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("Conv", [X, (6, 4, 2, 3), (6,)], {"strides": [2, 3]}),
        "n c h0 h1, o c w0 w1, o"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("Conv", [X, (6, 4, 2, 2)], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        "n c h0 h1, o c w0 w1"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("Conv", [X, (6, 4, 2, 2)], {"strides": [2, 2], "pads": [1, 0, 0, 0]}),
        "n c h0 h1, o c w0 w1"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("Conv", [X, (6, 4, 3, 3)], {"auto_pad": "SAME_LOWER"}),
        "n c h0 h1, o c w0 w1"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("ConvTranspose", [X, (4, 3, 3, 3), (3,)], {"strides": [2, 2]}),
        "n c h0 h1, c o w0 w1, o"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("ConvTranspose", [X, (4, 3, 2, 2), (3,)], {"strides": [2, 2]}),
        "n c h0 h1, c o w0 w1, o"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("ConvTranspose", [X, (4, 3, 2, 2)], {"group": 2, "strides": [2, 2]}),
        "n (g c) h0 h1, (g c) o w0 w1"
        " -> n (g o) y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("ConvTranspose", [X, (4, 3, 3, 3)], {"output_padding": [1, 0], "strides": [2, 2]}),
        "n c h0 h1, c o w0 w1"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("ConvTranspose", [X, (4, 3, 1, 1)]),
        "n c h0 h1, c o w0 w1 -> n o h0 h1 {sum: c, whole: w0 w1}",
    ),
    (
        Case("ConvInteger", [X8, W8], PADDED, [0, 1]),
        "n c h0 h1, o c w0 w1"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("ConvInteger", [X8, W8, ZERO, ZERO], {**PADDED, "group": 1}, [0, 1]),
        "n c h0 h1, o c w0 w1, (), ()"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case("QLinearConv", [X8, ONE, ZERO, W8, ONE, ZERO, BIG, ZERO], PADDED, [0, 3]),
        "n c h0 h1, _, _, o c w0 w1, (), (), _, _"
        " -> n o y0 y1 {communicating: c h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        Case(
            "QLinearConv",
            [X8, ONE, ZERO, W8[:, :2], ONES, ZEROS, BIG, ZERO, np.arange(6, dtype=np.int32)],
            {"group": 2},
            [0, 3],
        ),
        "n (g c) h0 h1, _, _, (g o) c w0 w1, (g o), (g o), _, _, (g o)"
        " -> n (g o) y0 y1 {communicating: c h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    # a halo that reaches over a whole part, and padding on one side
    (
        Case("Conv", [(1, 2, 9), (2, 2, 5), (2,)], {"dilations": [2], "pads": [7, 0]}),
        "n c h0, o c w0, o -> n o y0 {sum: c, communicating: h0, co-sharded: h0 y0, whole: w0}",
    ),
    # a stride that skips elements, in three dimensions
    (
        Case("Conv", [(1, 2, 5, 7, 4), (2, 2, 1, 2, 1)], {"strides": [2, 3, 1]}),
        "n c h0 h1 h2, o c w0 w1 w2"
        " -> n o y0 y1 h2 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1 w2}",
    ),
    (
        Case("Conv", [(1, 2, 6), (2, 2, 3)], {"pads": [3, 0]}),
        "n c h0, o c w0 -> n o y0 {sum: c, whole: w0 h0 y0}",
    ),
    # a window over all of a dimension is a product
    (
        Case("Conv", [(2, 2, 6, 5), (2, 2, 6, 3), (2,)], {"kernel_shape": [6, 3]}),
        "n c h0 h1, o c h0 w1, o -> n o 1 y1 {sum: c, sum: h0, communicating: h1, co-sharded: h1 y1, whole: w1}",
    ),
    (
        Case("QLinearConv", [X8[:, :, :3, :3], ONE, ZERO, W8, ONE, ZERO, BIG, ZERO], {}, [0, 3]),
        "n c h0 h1, _, _, o c h0 h1, (), (), _, _ -> n o 1 1 {communicating: c, whole: h0 h1}",
    ),
    (
        Case("ConvTranspose", [(1, 2, 5), (2, 2, 3)], {"strides": [2], "auto_pad": "SAME_LOWER"}),
        "n c h0, c o w0 -> n o y0 {sum: c, communicating: h0, co-sharded: h0 y0, whole: w0}",
    ),
    (
        Case("ConvTranspose", [(1, 2, 5), (2, 2, 2)], {"strides": [3], "dilations": [2]}),
        "n c h0, c o w0 -> n o y0 {sum: c, communicating: h0, co-sharded: h0 y0, whole: w0}",
    ),
    (
        Case("ConvTranspose", [(1, 2, 5), (2, 2, 1)], {"strides": [3], "output_padding": [2]}),
        "n c h0, c o w0 -> n o y0 {sum: c, communicating: h0, co-sharded: h0 y0, whole: w0}",
    ),
    (
        Case("ConvTranspose", [(1, 2, 5), (2, 2, 3)], {"strides": [2], "output_shape": [9]}),
        "n c h0, c o w0 -> n o y0 {sum: c, communicating: h0, co-sharded: h0 y0, whole: w0}",
    ),
    (
        Case(
            "ConvTranspose",
            [(1, 2, 5, 4), (2, 2, 3, 3)],
            {"strides": [2, 2], "output_shape": [12, 10]},
        ),
        "n c h0 h1, c o w0 w1"
        " -> n o y0 y1 {sum: c, communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
