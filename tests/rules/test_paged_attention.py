"""The rule of PagedAttention: heads of keys and values may be split, or the positions of
pages."""

import numpy as np
import pytest

from onnxpar.graph.paged_attention import COMPUTE, too_old
from onnxpar.testing.case import Case

pytestmark = pytest.mark.skipif(too_old() is not None, reason=str(too_old()))

CACHES = [(8, 3, 4, 16)] * 2
BYTES = [np.random.default_rng(i).integers(-99, 99, (8, 3, 4, 12)).astype(np.int8) for i in (0, 1)]
for each in BYTES:  # the scales behind the elements
    each[..., 8:] = np.full((8, 3, 4, 1), 0.02, np.float32).view(np.int8)
PLACES = [
    np.array([[6, 1, 4], [0, 7, 2]]),
    np.array([0, 0, 0, 1, 1]),
    np.array([4, 5, 6, 0, 9]),
]
TURNS = [np.random.default_rng(i).standard_normal((12, 8)).astype(np.float32) for i in (0, 1)]
HEADS = {"num_heads": 6, "kv_num_heads": 3}


def case(operands, attrs=None, fed=()):
    return Case(
        "PagedAttention", operands, {**HEADS, **(attrs or {})}, fed=fed, outputs=3, domain=COMPUTE
    )


CASES = [
    (
        case([(1, 5, 96), (1, 5, 48), (1, 5, 48), *CACHES, *PLACES, *TURNS, (6,)]),
        "1 s (k g d), 1 s (k d), 1 s (k d), n k p e, n k p e, r m, s, s, q c, q c, (k g)"
        " -> 1 s (k g d); n k p e; n k p e {communicating: p, whole: s n r m d e q c}",
    ),
    (
        case([(1, 5, 192), None, None, *CACHES, *PLACES], {"local_window_size": 4}),
        "1 s (k g d) + (k d) + (k d), _, _, n k p e, n k p e, r m, s, s"
        " -> 1 s (k g d); n k p e; n k p e {communicating: p, whole: s n r m d e}",
    ),
    (
        case(
            [(1, 5, 48), (1, 5, 24), (1, 5, 24), *BYTES, *PLACES],
            {"scale_bytes": 4, "smooth_softmax": 1, "softcap": 3.0},
            fed=[3, 4],
        ),
        "1 s (k g d), 1 s (k d), 1 s (k d), n k p e, n k p e, r m, s, s"
        " -> 1 s (k g d); n k p e; n k p e {communicating: p, whole: s n r m d e}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=["rotated", "packed", "int8"])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
