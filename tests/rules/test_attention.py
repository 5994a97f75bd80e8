"""Rules of attention and rotary embeddings."""

import pytest
from numpy import array

from onnxpar.rules.case import Case

Q, K, V = (2, 4, 3, 6), (2, 2, 5, 6), (2, 2, 5, 8)
FLAT = [(2, 3, 24), (2, 5, 12), (2, 5, 16)]
HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
MASK = array([[True] * 5, [True, False, True, True, False], [False, True, True, True, True]])
PAST = [(2, 2, 4, 6), (2, 2, 4, 8)]
ANGLES = (2, 3, 3)
PLACES = array([[0, 1, 2], [4, 1, 3]])

CASES = [
    (
        Case("Attention", [Q, K, V], opset=23),
        "b (k g) s d, b k t d, b k t e -> b (k g) s e {whole: t d}",
    ),
    (
        Case("Attention", [Q, K, V, MASK], fed=[3], opset=23),
        "b (k g) s d, b k t d, b k t e, s u -> b (k g) s e {whole: t d u}",
    ),
    (
        Case("Attention", [Q, K, V, (2, 4, 3, 5)], {"scale": 0.3}, opset=23),
        "b (k g) s d, b k t d, b k t e, b (k g) s u -> b (k g) s e {whole: t d u}",
    ),
    (
        Case("Attention", [Q, K, V, (2, 1, 3, 5)], {"softcap": 2.0}, opset=23),
        "b (k g) s d, b k t d, b k t e, b 1 s u -> b (k g) s e {whole: t d u}",
    ),
    (
        Case("Attention", [(2, 4, 5, 6), K, V], {"is_causal": 1}, opset=23),
        "b (k g) s d, b k t d, b k t e -> b (k g) s e {whole: t d s}",
    ),
    (
        Case("Attention", [*FLAT, MASK], HEADS, fed=[3], opset=23),
        "b s (k g d), b t (k d), b t (k e), s u -> b s (k g e) {whole: t d u}",
    ),
    (
        Case("Attention", [Q, K, V, (3, 9), *PAST], outputs=3, opset=23),
        "b (k g) s d, b k t d, b k t e, s u, b k p d, b k p e"
        " -> b (k g) s e; b k u d; b k u e {whole: t d p u}",
    ),
    (
        Case("Attention", [*FLAT, None, *PAST], HEADS, outputs=3, opset=23),
        "b s (k g d), b t (k d), b t (k e), _, b k p d, b k p e"
        " -> b s (k g e); b k u d; b k u e {whole: t d p u}",
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
