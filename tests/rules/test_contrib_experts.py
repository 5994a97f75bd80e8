"""Rules of onnxruntime's own mixtures of experts."""

import numpy as np
import pytest
from numpy import array

from onnxpar.rules.rule import rule_of
from onnxpar.testing.case import Case

RNG = np.random.default_rng(0)
FLOATS = [(6, 4), (6, 5), (5, 8, 4), (5, 8), (5, 4, 8), (5, 4)]
TEXT = "t h, t r, e f h, e f, e h f, e h -> t h {sum: e, sum: f, whole: h r}"
EQUAL = array([[1, 1, 1, 1, 0]] * 3 + [[0, 2, 2, 2, 2]] * 3, np.float32)
"""Scores among which the kernels take the last ones."""
FEW = array([[0, 3, 0, 0, 2]] * 6, np.float32)
"""Scores by which three experts get no tokens."""


def case(op, operands, **attrs):
    fed = [i for i in (1, 14) if len(operands) > i and not isinstance(operands[i], tuple)]
    return Case(op, operands, attrs, fed=fed, domain="com.microsoft")


def codes(*shape):
    return RNG.integers(0, 256, shape).astype(np.uint8)


def scales(*shape):
    return RNG.uniform(0.01, 0.05, shape).astype(np.float32)


MOE = [
    (case("MoE", FLOATS, k=2), TEXT),
    (case("MoE", FLOATS, k=3, normalize_routing_weights=1), TEXT),
    (case("MoE", [FLOATS[0], EQUAL, *FLOATS[2:]], k=2), TEXT),
    (case("MoE", [FLOATS[0], FEW, *FLOATS[2:]], k=2, normalize_routing_weights=1), TEXT),
    (
        case("MoE", FLOATS, k=2, use_sparse_mixer=1),
        "t h, t r, e f h, e f, e h f, e h -> t h {sum: f, whole: h r e}",
    ),
    (
        case(
            "MoE",
            [(2, 3, 4), (6, 3), (3, 8, 4), None, (3, 4, 4)],
            k=1,
            activation_type="swiglu",
            swiglu_fusion=1,
        ),
        "b s h, (b s) r, e (f z) h, _, e h f -> b s h {sum: e, sum: f, whole: h r z}",
    ),
    (
        case("MoE", [(6, 4), (6, 3), (3, 4, 8), (3, 8), (3, 8, 4), (3, 4)], k=2),
        "t h, t r, e p2_1 p2_2, e p3_1, e p4_1 p4_2, e p5_1 -> t h "
        "{sum: e, whole: h r p2_1 p2_2 p3_1 p4_1 p4_2 p5_1}",
    ),
]


@pytest.mark.parametrize(("case", "text"), MOE)
def test_floats(prove_rule, case, text):
    prove_rule(case, text)


ROWS = [(6, 32), (6, 4), codes(4, 24, 16), scales(4, 24), (4, 24), codes(4, 32, 12), scales(4, 32)]
BLOCKS = [codes(3, 64, 16), scales(3, 64, 2), (3, 64), codes(3, 32, 32), scales(3, 32, 4), (3, 32)]
HALVES = [codes(3, 64, 16), scales(3, 64, 2), None, codes(3, 32, 16), scales(3, 32, 2)]
QMOE = [
    (
        case("QMoE", [*ROWS, (4, 32)], k=2, activation_type="relu"),
        "t h, t r, e (f i) p2, e (f i), e (f i), e h (f p5), e h, e h -> t h "
        "{sum: e, sum: f, whole: h r i p2 p5}",
    ),
    (
        case(
            "QMoE",
            [ROWS[0], EQUAL[:, :4], *ROWS[2:], None, None, None, None, codes(4, 12), codes(4, 16)],
            k=3,
            activation_type="silu",
        ),
        "t h, t r, e (f i) p2, e (f i), e (f i), e h (f p5), e h, _, _, _, _, e (f u), e p12 -> "
        "t h {sum: e, sum: f, whole: h r i u p2 p5 p12}",
    ),
    (
        case("QMoE", [*ROWS, *[None] * 7, np.abs(EQUAL[:, :4] - 3)], k=2),
        "t h, t r, e (f i) p2, e (f i), e (f i), e h (f p5), e h, _, _, _, _, _, _, _, t r -> t h "
        "{sum: e, sum: f, whole: h r i p2 p5}",
    ),
    (
        case(
            "QMoE",
            [*ROWS, *[None] * 7, scales(6, 4)],
            k=2,
            normalize_routing_weights=1,
        ),
        "t h, t r, e (f i) p2, e (f i), e (f i), e h (f p5), e h, _, _, _, _, _, _, _, t r -> t h "
        "{sum: e, sum: f, whole: h r i p2 p5}",
    ),
    (
        case(
            "QMoE",
            [(6, 32), (6, 3), *BLOCKS, None, None, None, codes(3, 64, 1), codes(3, 32, 2)],
            k=2,
            block_size=16,
        ),
        "t h, t r, e (f i) p2, e (f i) p3, e (f i), e h (f p5), e h (f p6), e h, _, _, _, "
        "e (f i) p11, e h (f p12) -> t h {sum: e, sum: f, whole: h r i p2 p3 p5 p6 p11 p12}",
    ),
    (
        case(
            "QMoE",
            [(2, 3, 32), (6, 3), *HALVES],
            k=2,
            block_size=16,
            activation_type="swiglu",
            swiglu_fusion=1,
        ),
        "b s h, (b s) r, e (f i z) p2, e (f i z) p3, _, e h (f p5), e h (f p6) -> b s h "
        "{sum: e, sum: f, whole: h r i z p2 p3 p5 p6}",
    ),
]


@pytest.mark.parametrize(("case", "text"), QMOE)
def test_integers(prove_rule, case, text):
    prove_rule(case, text)


def test_weights_of_other_kinds_stay_whole():
    given = case("QMoE", ROWS, k=2, quant_type="fp4")
    node = given.graph([np.zeros((6, 32), np.float32)]).nodes[0]
    assert rule_of(node).text() == "t h, t r, _, _, _, _, _ -> t h {whole: h r}"


def test_columns_of_three_bits_stay_whole():
    given = case("QMoE", ROWS, k=2, expert_weight_bits=3)
    node = given.graph([np.zeros((6, 32), np.float32)]).nodes[0]
    assert rule_of(node).text().startswith("t h, t r, e p2_1 p2_2, e p3_1, e p4_1, e p5_1 p5_2")


def test_products_are_those_of_the_chosen_experts():
    node = case("MoE", FLOATS, k=2).graph([np.zeros((6, 4), np.float32)]).nodes[0]
    rule = rule_of(node)
    every = 6 * 2 * (8 * 4 + 4 * 8)
    assert rule.ranks.products(rule.sizes) == every
    assert rule.ranks.products({**rule.sizes, "e": 2}) == every * 2 // 5
    assert rule.ranks.products({**rule.sizes, "f": 4}) == every // 2
