"""Rules of attention and rotary embeddings."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

Q, K, V = (2, 4, 3, 6), (2, 2, 5, 6), (2, 2, 5, 8)
FLAT = [(2, 3, 24), (2, 5, 12), (2, 5, 16)]
HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
MASK = array([[True] * 5, [True, False, True, True, False], [False, True, True, True, True]])
HIDING = array([[True] * 5, [False] * 5, [False, True, True, False, False]])
"""A mask that hides every key from one query."""
LONG = [(1, 9, 24), (1, 9, 12), (1, 9, 16)]
CAUSAL = {"is_causal": 1}
LENGTHS = array([3, 5])
HALVES = [np.random.default_rng(0).standard_normal(s).astype(np.float16) for s in FLAT]
HALF_MASK = np.linspace(-1, 1, 15, dtype=np.float16).reshape(3, 5)
PAST = [(2, 2, 4, 6), (2, 2, 4, 8)]
ANGLES = (2, 3, 3)
PLACES = array([[0, 1, 2], [4, 1, 3]])

CASES = [
    (
        Case("Attention", [Q, K, V], opset=23),
        "b (k g) s d, b k t d, b k t e -> b (k g) s e {communicating: t, whole: d}",
    ),
    (
        Case("Attention", [Q, K, V, MASK], fed=[3], opset=23),
        "b (k g) s d, b k t d, b k t e, s t -> b (k g) s e {communicating: t, whole: d}",
    ),
    (
        Case("Attention", [Q, K, V, (2, 4, 3, 5)], {"scale": 0.3}, opset=23),
        "b (k g) s d, b k t d, b k t e, b (k g) s t -> b (k g) s e {communicating: t, whole: d}",
    ),
    (
        Case("Attention", [Q, K, V, (2, 1, 3, 5)], {"softcap": 2.0}, opset=23),
        "b (k g) s d, b k t d, b k t e, b 1 s t -> b (k g) s e {communicating: t, whole: d}",
    ),
    (
        Case("Attention", [(2, 4, 5, 6), K, V], {"is_causal": 1}, opset=23),
        "b (k g) s d, b k t d, b k t e -> b (k g) s e {communicating: t, whole: d}",
    ),
    (
        Case("Attention", [*FLAT, MASK], HEADS, fed=[3], opset=23),
        "b s (k g d), b t (k d), b t (k e), s t -> b s (k g e) {communicating: t, whole: d}",
    ),
    (
        Case("Attention", LONG, {**HEADS, **CAUSAL, "softcap": 2.0}, outputs=3, opset=23),
        "b s (k g d), b t (k d), b t (k e)"
        " -> b s (k g e); b k t d; b k t e {communicating: t, whole: d}",
    ),
    (
        Case("Attention", FLAT, {**HEADS, **CAUSAL, "left_window_size": 1}, opset=25),
        "b s (k g d), b t (k d), b t (k e) -> b s (k g e) {communicating: t, whole: d}",
    ),
    *(
        (
            Case(
                "Attention",
                [Q, K, V, mask],
                {"softcap": 2.0, "is_causal": causal, "qk_matmul_output_mode": mode},
                [3],
                outputs=4,
                opset=23,
            ),
            "b (k g) s d, b k t d, b k t e, s t"
            " -> b (k g) s e; b k t d; b k t e; b (k g) s t {communicating: t, whole: d}",
        )
        for mode, mask, causal in ((0, MASK, 1), (1, HIDING, 0), (2, HIDING, 1), (3, MASK, 1))
    ),
    *(
        (
            Case(
                "Attention", [Q, K, V, np.where(HIDING, 0.5, hidden).astype(np.float32)], opset=23
            ),
            "b (k g) s d, b k t d, b k t e, s t -> b (k g) s e {communicating: t, whole: d}",
        )
        for hidden in (-np.inf, np.finfo(np.float32).min, -1e30)
    ),
    (
        Case("Attention", [Q, K, V, None, None, None, LENGTHS], CAUSAL, fed=[6], opset=24),
        "b (k g) s d, b k t d, b k t e, _, _, _, b -> b (k g) s e {communicating: t, whole: d}",
    ),
    (
        Case("Attention", [*HALVES, HALF_MASK], {**HEADS, "is_causal": 1}, [0, 1, 2], 4, 23),
        "b s (k g d), b t (k d), b t (k e), s t"
        " -> b s (k g e); b k t d; b k t e; b (k g) s t {communicating: t, whole: d}",
    ),
    (
        Case("Attention", [Q, K, V, (3, 9), *PAST], outputs=3, opset=23),
        "b (k g) s d, b k t d, b k t e, s u, b k p d, b k p e"
        " -> b (k g) s e; b k u d; b k u e {whole: d t p u}",
    ),
    (
        Case("Attention", [*FLAT, None, *PAST], {**HEADS, "is_causal": 1}, outputs=3, opset=23),
        "b s (k g d), b t (k d), b t (k e), _, b k p d, b k p e"
        " -> b s (k g e); b k u d; b k u e {whole: d t p u}",
    ),
    *(
        (
            Case("Attention", [Q, K, V, MASK], window, fed=[3], opset=25),
            "b (k g) s d, b k t d, b k t e, s t -> b (k g) s e {communicating: t, whole: d}",
        )
        for window in (
            {"left_window_size": 1},
            {"left_window_size": 2, "right_window_size": 1},
            {"right_window_size": 0, "left_window_size": 3, "is_causal": 1},
        )
    ),
    (
        Case(
            "Attention", [*FLAT, None, *PAST], {**HEADS, "left_window_size": 2}, outputs=3, opset=25
        ),
        "b s (k g d), b t (k d), b t (k e), _, b k p d, b k p e"
        " -> b s (k g e); b k u d; b k u e {whole: d t p u}",
    ),
    (
        Case(
            "Attention",
            [Q, K, V, None, None, None, LENGTHS],
            {"left_window_size": 1, "right_window_size": 1},
            fed=[6],
            opset=25,
        ),
        "b (k g) s d, b k t d, b k t e, _, _, _, b -> b (k g) s e {communicating: t, whole: d}",
    ),
    (
        Case("RotaryEmbedding", [Q, ANGLES, ANGLES], opset=23),
        "b h s d, b s r, b s r -> b h s d {whole: d r}",
    ),
    (
        Case("RotaryEmbedding", [Q, (5, 3), (5, 3), PLACES], fed=[3], opset=23),
        "b h s d, p r, p r, b s -> b h s d {whole: d r p}",
    ),
    (
        Case("RotaryEmbedding", [FLAT[0], ANGLES, ANGLES], {"num_heads": 4}, opset=23),
        "b s (h d), b s r, b s r -> b s (h d) {whole: d r}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
