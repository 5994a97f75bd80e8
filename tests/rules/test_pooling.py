"""Rules of pools."""

import pytest

from onnxpar.testing.case import Case

X = (2, 4, 6, 6)
PADDED = {"pads": [1, 1, 1, 1]}

CASES = [
    (Case("MaxPool", [X], {"kernel_shape": [6, 6]}), "n c h0 h1 -> n c 1 1 {max: h0, max: h1}"),
    (
        Case("MaxPool", [X], {"kernel_shape": [6, 2], "strides": [1, 2]}),
        "n c h0 h1 -> n c 1 y1 {max: h0, communicating: h1, co-sharded: h1 y1}",
    ),
    (Case("AveragePool", [X], {"kernel_shape": [6, 6]}), "n c h0 h1 -> n c 1 1 {sum: h0, sum: h1}"),
    (
        Case("AveragePool", [X], {"kernel_shape": [3, 6], "strides": [2, 6], "pads": [1, 0, 1, 0]}),
        "n c h0 h1 -> n c y0 1 {sum: h1, communicating: h0, co-sharded: h0 y0}",
    ),
    (
        Case("MaxPool", [X], {"kernel_shape": [6, 2], "strides": [1, 2]}, outputs=2),
        "n c h0 h1 -> n c y0 y1; n c y0 y1 {communicating: h1, co-sharded: h1 y1, whole: h0 y0}",
    ),
    (
        Case("MaxPool", [X], {"kernel_shape": [3, 3], "strides": [2, 2], **PADDED}),
        "n c h0 h1 -> n c y0 y1 {communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1}",
    ),
    (
        Case("MaxPool", [X], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        "n c h0 h1 -> n c y0 y1 {communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1}",
    ),
    (
        Case("MaxPool", [X], {"kernel_shape": [3, 2], "strides": [1, 2]}, outputs=2),
        "n c h0 h1 -> n c y0 y1; n c y0 y1 {communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1}",
    ),
    (
        Case(
            "MaxPool",
            [(2, 3, 7, 6)],
            {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "storage_order": 1},
            outputs=2,
        ),
        "n c h0 h1 -> n c y0 y1; n c y0 y1 {communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1}",
    ),
    (
        Case("MaxPool", [(2, 3, 7)], {"kernel_shape": [2], "dilations": [2]}, outputs=2),
        "n c h0 -> n c y0; n c y0 {communicating: h0, co-sharded: h0 y0}",
    ),
    (
        Case(
            "MaxPool",
            [(1, 2, 5, 6, 4)],
            {"kernel_shape": [2, 1, 3], "dilations": [2, 1, 1], "storage_order": 1},
            outputs=2,
        ),
        "n c h0 h1 h2 -> n c y0 h1 y2; n c y0 h1 y2 {communicating: h0 h2, co-sharded: h0 y0, co-sharded: h2 y2}",
    ),
    (
        Case(
            "MaxPool",
            [(2, 3, 6)],
            {"kernel_shape": [1], "strides": [3], "auto_pad": "SAME_UPPER"},
            outputs=2,
        ),
        "n c h0 -> n c y0; n c y0 {whole: h0 y0}",
    ),
    (
        Case("AveragePool", [X], {"kernel_shape": [3, 3], "count_include_pad": 1, **PADDED}),
        "n c h0 h1 -> n c y0 y1 {communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1}",
    ),
    (
        Case("AveragePool", [X], {"kernel_shape": [2, 3], "strides": [2, 3]}),
        "n c h0 h1 -> n c y0 y1 {communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1}",
    ),
    (
        Case("AveragePool", [X], {"kernel_shape": [4, 4], "strides": [4, 4], "ceil_mode": 1}),
        "n c h0 h1 -> n c y0 y1 {communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1}",
    ),
    (
        Case("LpPool", [X], {"kernel_shape": [3, 3]}),
        "n c h0 h1 -> n c y0 y1 {communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1}",
    ),
    (Case("GlobalAveragePool", [X]), "n c h0 h1 -> n c 1 1 {sum: h0, sum: h1}"),
    (Case("GlobalAveragePool", [(2, 4, 5)]), "n c h0 -> n c 1 {sum: h0}"),
    (Case("GlobalMaxPool", [X]), "n c h0 h1 -> n c 1 1 {max: h0, max: h1}"),
    (Case("GlobalLpPool", [X]), "n c h0 h1 -> n c 1 1 {communicating: h0 h1}"),
    (Case("GlobalLpPool", [(2, 4, 5)], {"p": 3}), "n c h0 -> n c 1 {communicating: h0}"),
    # the last window reaches beyond the padding, of which some counts
    (
        Case(
            "AveragePool",
            [(1, 2, 9)],
            {
                "kernel_shape": [3],
                "strides": [3],
                "pads": [1, 1],
                "ceil_mode": 1,
                "count_include_pad": 1,
            },
        ),
        "n c h0 -> n c y0 {communicating: h0, co-sharded: h0 y0}",
    ),
    (
        Case("AveragePool", [(1, 2, 7)], {"kernel_shape": [3], "strides": [2], "pads": [2, 1]}),
        "n c h0 -> n c y0 {communicating: h0, co-sharded: h0 y0}",
    ),
    (
        Case(
            "MaxPool",
            [(1, 2, 7, 8)],
            {
                "kernel_shape": [2, 3],
                "dilations": [2, 1],
                "auto_pad": "SAME_UPPER",
                "strides": [1, 2],
            },
        ),
        "n c h0 h1 -> n c y0 y1 {communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1}",
    ),
    (
        Case(
            "LpPool", [(1, 2, 8)], {"kernel_shape": [1], "strides": [3], "auto_pad": "SAME_UPPER"}
        ),
        "n c h0 -> n c y0 {whole: h0 y0}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
