"""Gradients of convolutions."""

import pytest

from onnxpar.testing.case import Case

X = (2, 4, 5, 6)

CASES = [
    Case("Conv", [X, (3, 4, 3, 2)]),
    Case("Conv", [X, (3, 4, 3, 3), (3,)], {"pads": [1, 1, 1, 1]}),
    Case("Conv", [X, (3, 4, 2, 3), (3,)], {"strides": [2, 2], "pads": [0, 1, 1, 0]}),
    Case("Conv", [(2, 3, 6), (2, 3, 2)], {"strides": [4], "dilations": [2]}),
    Case("Conv", [(2, 3, 9), (2, 3, 2), (2,)], {"strides": [3], "dilations": [4], "pads": [2, 1]}),
    Case("Conv", [(1, 2, 3, 4, 3), (3, 2, 2, 3, 1)], {"strides": [1, 2, 2], "pads": [1, 0, 0] * 2}),
    Case("Conv", [(2, 2, 3, 3, 3), (4, 1, 2, 2, 2), (4,)], {"group": 2, "dilations": [2, 1, 1]}),
    Case("Conv", [X, (6, 2, 3, 3), (6,)], {"group": 2, "strides": [2, 1], "pads": [1, 0, 1, 0]}),
    Case("Conv", [X, (4, 1, 3, 3), (4,)], {"group": 4, "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    Case("Conv", [X, (8, 1, 2, 3)], {"group": 4, "dilations": [2, 1]}),
    *(
        Case("Conv", [X, (3, 4, 3, 2)], {"auto_pad": auto, "strides": [2, 2]})
        for auto in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    Case("Conv", [(2, 3, 6), (2, 3, 3)], {"pads": [3, 0], "strides": [2], "dilations": [2]}),
    Case("Conv", [(2, 3, 6), (2, 3, 3)], {"auto_pad": "SAME_UPPER", "strides": [3]}),
    # windows of one element
    Case("Conv", [X, (3, 4, 1, 1), (3,)]),
    Case("Conv", [X, (3, 4, 1, 1)], {"strides": [2, 1]}),
    Case("Conv", [(2, 4, 5), (3, 4, 1)], {"pads": [1, 2]}),
    Case("Conv", [(2, 4, 1), (3, 4, 1)], {"strides": [2]}),
    Case("Conv", [(2, 4, 2), (3, 4, 1)], {"strides": [2], "pads": [1, 1]}),
    Case("Conv", [(2, 4, 3), (3, 4, 1)], {"strides": [2], "pads": [0, 2]}),
    Case("Conv", [(2, 4, 5), (6, 2, 1)], {"group": 2}),
    Case("ConvTranspose", [(2, 4, 5), (4, 3, 1), (3,)]),
    # nothing to convolve, or nothing to sum
    Case("Conv", [(0, 4, 5, 6), (3, 4, 3, 2), (3,)]),
    Case("ConvTranspose", [(0, 4, 3, 3), (4, 3, 3, 2), (3,)]),
    Case("ConvTranspose", [(2, 3, 3, 4), (3, 4, 3, 2)]),
    Case("ConvTranspose", [(2, 3, 3, 4), (3, 4, 3, 2), (4,)], {"pads": [1, 0, 0, 1]}),
    Case(
        "ConvTranspose",
        [(2, 3, 3, 4), (3, 2, 3, 2), (2,)],
        {"strides": [2, 3], "output_padding": [1, 2], "pads": [1, 0, 1, 1]},
    ),
    Case(
        "ConvTranspose",
        [(1, 2, 4), (2, 3, 3)],
        {"dilations": [2], "strides": [3], "output_padding": [2]},
    ),
    Case("ConvTranspose", [(1, 2, 4), (2, 3, 2)], {"strides": [4], "output_padding": [3]}),
    Case("ConvTranspose", [(2, 4, 3, 3), (4, 3, 2, 2), (6,)], {"group": 2, "strides": [2, 2]}),
    Case("ConvTranspose", [(2, 4, 4), (4, 1, 3), (4,)], {"group": 4, "strides": [2]}),
    Case("ConvTranspose", [(1, 2, 2, 3, 2), (2, 2, 2, 1, 3)], {"strides": [2, 1, 1]}),
    *(
        Case("ConvTranspose", [(1, 2, 4), (2, 3, 3)], {"auto_pad": auto, "strides": [2]})
        for auto in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    *(
        Case("ConvTranspose", [(1, 2, 4), (2, 3, 3)], {"output_shape": [size], "strides": [2]})
        for size in (6, 9, 10)
    ),
]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_gradient(prove, case):
    prove(case)
