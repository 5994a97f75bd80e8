"""Rules of onnxruntime's newer ops: hyper-connections, Engram, rotary positions, packed products."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

RNG = np.random.default_rng(9)


def case(op, operands, attrs=None, fed=(), **fields):
    return Case(op, operands, attrs or {}, fed, domain="com.microsoft", **fields)


PACKED = RNG.integers(0, 255, 32 * 6 // 2, np.uint8)
LIMITS = RNG.random(32 * 6 // 16).astype(np.float32)
BNB = {"K": 32, "N": 6, "block_size": 16, "quant_type": 1}
IDS = RNG.integers(0, 9, (4, 5))
PLACES = RNG.integers(0, 7, (3, 2, 4))
TURNS = [np.cos(np.linspace(0, 3, 28, dtype=np.float32)).reshape(7, 4)] * 2
STREAMS, BLOCK, MIX = (4, 2, 3, 6), (4, 2, 6), (4, 2, 3, 3)
ROTARY = {"mrope_section": [2, 1, 1]}
HASH = {"max_ngram_size": 3, "n_head_per_ngram": 2, "pad_id": 1}
HASH_OPERANDS = [IDS, array([3, 5, 7]), array([11, 13, 17, 19])]

CASES = [
    (
        case("MatMulBnb4", [(3, 32), PACKED, LIMITS], BNB),
        "m0 k, (n w), (n z) -> m0 n {whole: k w z}",
    ),
    (
        case("MatMulBnb4", [(2, 3, 32), PACKED, LIMITS], BNB),
        "m0 m1 k, (n w), (n z) -> m0 m1 n {whole: k w z}",
    ),
    (
        case("HyperConnectionPreMix", [STREAMS, (4, 2, 3)], {"reduction_scale": 0.5}),
        "d0 d1 c h, d0 d1 c -> d0 d1 h {sum: c}",
    ),
    (
        case("HyperConnectionPreMix", [STREAMS, (4, 2, 3, 1)]),
        "d0 d1 c h, d0 d1 c 1 -> d0 d1 h {sum: c}",
    ),
    (
        case("HyperConnectionPreMix", [STREAMS, STREAMS]),
        "d0 d1 c h, d0 d1 c h -> d0 d1 h {sum: c}",
    ),
    (
        case("HyperConnectionPostMix", [STREAMS, BLOCK, (4, 2, 3)]),
        "d0 d1 c h, d0 d1 h, d0 d1 c -> d0 d1 c h",
    ),
    (
        case("HyperConnectionPostMix", [STREAMS, BLOCK, STREAMS, MIX]),
        "d0 d1 c h, d0 d1 h, d0 d1 c h, d0 d1 x y -> d0 d1 c h {whole: c x y}",
    ),
    (
        case("HyperConnectionPreMix", [(4, 2, 18), (4, 2, 3)], {"num_branches": 3}),
        "d0 d1 (c h), d0 d1 c -> d0 d1 h {sum: c}",
    ),
    (
        case("HyperConnectionPreMix", [(4, 2, 18), (4, 2, 18)], {"num_branches": 3}),
        "d0 d1 (c h), d0 d1 (c h) -> d0 d1 h {sum: c}",
    ),
    (
        case("HyperConnectionPostMix", [(4, 2, 18), BLOCK, (4, 2, 3)], {"num_branches": 3}),
        "d0 d1 (c h), d0 d1 h, d0 d1 c -> d0 d1 (c h)",
    ),
    (
        case("EngramGate", [STREAMS, STREAMS, BLOCK, (3, 6), (3, 6)]),
        "b s c h, b s c h, b s h, c h, c h -> b s c h {communicating: h}",
    ),
    (
        case("EngramGate", [STREAMS, STREAMS, BLOCK, (3, 6), (3, 6), (3, 6)], outputs=2),
        "b s c h, b s c h, b s h, c h, c h, c h -> b s c h; b s c h {communicating: h}",
    ),
    (
        case("MRotaryEmbedding", [(2, 3, 4, 8), PLACES, *TURNS], ROTARY, [1]),
        "b n s h, z b s, _, _ -> b n s h {whole: h z}",
    ),
    (
        case("MRotaryEmbedding", [(2, 4, 24), PLACES, *TURNS], {**ROTARY, "num_heads": 3}, [1]),
        "b s h, z b s, _, _ -> b s h {whole: h z}",
    ),
    (
        case("NGramHashMapping", HASH_OPERANDS, HASH, [0], outputs=2),
        "b s, _, _ -> b s o; b p {whole: s p o}",
    ),
    (
        case("NGramHashMapping", [*HASH_OPERANDS, IDS[:, :2]], HASH, [0, 3], outputs=2),
        "b s, _, _, b p -> b s o; b p {whole: s p o}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES)
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
