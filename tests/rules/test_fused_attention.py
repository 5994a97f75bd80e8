"""Rules of attention as an op of the compiler; whole models compare it with onnxruntime
(tests/strategy/test_rings.py)."""

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from onnxpar.rules.fused_attention import DOMAIN
from onnxpar.rules.rule import rule_of

Q, K, V, Y = (2, 4, 3, 6), (2, 2, 5, 6), (2, 2, 5, 8), (2, 4, 3, 8)
SUMMARY = (2, 4, 3, 2)
HEADS = {"q_num_heads": 4, "kv_num_heads": 2}


@pytest.mark.parametrize(
    ("op", "operands", "results", "attrs", "text"),
    [
        (
            "Attention",
            [Q, K, V, (3, 5)],
            [Y, SUMMARY],
            {},
            "b (k g) s d, b k t d, b k t e, s m -> b (k g) s e; b (k g) s p"
            " {communicating: t, whole: d m p}",
        ),
        (
            "Attention",
            [(2, 3, 24), (2, 5, 12), (2, 5, 16), (2, 1, 1, 5), None, None, (2,)],
            [(2, 3, 32)],
            HEADS,
            "b s (k g d), b t (k d), b t (k e), b 1 1 m, _, _, b -> b s (k g e)"
            " {communicating: t, whole: d m}",
        ),
        (
            "AttentionGradient",
            [Q, K, V, None, None, None, None, Y, Y, SUMMARY],
            [Q, None, V],
            {},
            "b (k g) s d, b k t d, b k t e, _, _, _, _, b (k g) s e, b (k g) s e, b (k g) s p"
            " -> b (k g) s d; _; b k t e {communicating: s t, whole: d p e}",
        ),
        (
            "ScoredAttention",
            [Q, (2, 2, 6, 5), V, (4, 1, 5), ()],
            [Y],
            {"steps": ["Mul . 4", "Add 3 ."], "guarded": 0},
            "b (k g) s d, b k d t, b k t e, (k g) 1 m, () -> b (k g) s e"
            " {communicating: t, whole: d m}",
        ),
        (
            "ScoredAttention",
            [(8, 3, 6), (8, 6, 5), (8, 5, 6)],
            [(8, 3, 6)],
            {"steps": [], "guarded": 1},
            "(k g) s d, k d t, k t e -> (k g) s e {communicating: t, whole: d}",
        ),
    ],
)
def test_rule(op, operands, results, attrs, text):
    def made(shapes, name):
        every = enumerate(shapes)
        return [gs.Variable(f"{name}{i}" if s is not None else "", np.float32, s) for i, s in every]

    node = gs.Node(op, "a", attrs, made(operands, "x"), made(results, "y"), DOMAIN)
    rule = rule_of(node)
    assert rule.text() == text
    assert rule.rings == (("s", "t"),) and not rule.ranks.has_kernel


def test_rule_of_cached_attention():
    shapes = [(2, 3, 64), None, None, (2, 2, 9, 8), (2, 2, 9, 8), (2,), (), (9, 4), (9, 4)]
    every = enumerate(shapes)
    operands = [gs.Variable(f"x{i}" if s is not None else "", np.float32, s) for i, s in every]
    results = [(2, 3, 32), (2, 2, 9, 8), (2, 2, 9, 8)]
    outputs = [gs.Variable(f"y{i}", np.float32, s) for i, s in enumerate(results)]
    attrs = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}
    rule = rule_of(gs.Node("CachedAttention", "a", attrs, operands, outputs, DOMAIN))
    assert rule.text() == (
        "b s (k g d) + (k d) + (k d), _, _, b k p d, b k p d, b, (), m r, m r"
        " -> b s (k g d); b k p d; b k p d {communicating: p, whole: s d m r}"
    )
