"""Rules of onnxruntime's own recurrences, packed lookups and products, and routers."""

import numpy as np
import pytest
from numpy import array
from processor import four_bit_floats

from onnxpar.testing.case import Case

RNG = np.random.default_rng(5)


def small(*shape):
    return (RNG.standard_normal(shape) / 4).astype(np.float32)


def case(op, operands, attrs=None, outputs=1, weights=()):
    fed = [i for i, x in enumerate(operands) if x is not None and i not in weights]
    return Case(op, operands, attrs or {}, fed, outputs, domain="com.microsoft")


def delta_net(lead, batch=2, **attrs):
    keys, heads, d, e = 2, 4, 3, 5
    operands = [small(*lead, keys, d), small(*lead, keys, d), small(*lead, heads, e), None]
    operands += [-np.abs(small(*lead, heads)), np.abs(small(*lead, heads))]
    return [*operands, small(batch, heads, e, d)]


OF_HEADS = "{0} k d, {0} k d, {0} (k g) e, _, {0} (k g){1}, {0} (k g), b (k g) e d{2}"
MADE = " -> {0} (k g) e; b (k g) e d {{whole: {1}}}"
NET = delta_net((2, 3))
GATES = [small(4), small(4)]
PACKED_NET = [small(6, 32), None, None, None, *delta_net((6,))[4:]]
SEQUENCES = [*delta_net((6,))[:3], array([0, 2, 6], np.int32), *delta_net((6,))[4:]]
WORDS = RNG.integers(1, 9, (4, 6)).astype(np.int32)
ATTENDING = [small(3, 4, 2), small(1, 12, 8), small(1, 12, 3), small(1, 24)]
ATTENDING += [None, small(1, 4, 3), small(1, 4, 3), None]
ATTENDING += [small(1, 3, 5), small(1, 6, 5), small(1, 5), small(4, 7, 6)]
CONVOLVED = [small(6, 4), small(4, 1, 3), array([0, 2, 6], np.int32), small(4), small(2, 4, 2)]
LOGITS = small(2, 3, 8)
ROUTED = {"n_group": 2, "topk_group": 1, "top_k": 2, "group_topk": 2}
TABLE = RNG.standard_normal((7, 8)).astype(np.float32).view(np.uint8)
PLAIN = {"packed_type": 0, "K": 8, "output_dtype": 1}
BLOCK = [RNG.random(1, np.float32).tobytes() + RNG.bytes(16) for _ in range(12)]
BLOCKS = np.frombuffer(b"".join(BLOCK), np.uint8)

CASES = [
    (
        case("GatedDeltaNet", NET, outputs=2),
        OF_HEADS.format("b s", "", "") + MADE.format("b s", "s d"),
    ),
    (
        case("GatedDeltaNet", [*NET, *GATES], {"gate_activation": "softplus"}, 2),
        OF_HEADS.format("b s", "", ", (k g), (k g)") + MADE.format("b s", "s d"),
    ),
    (
        case(
            "GatedDeltaNet",
            [*NET[:4], -np.abs(small(2, 3, 4, 3)), *NET[5:], GATES[0], small(12)],
            {"gate_activation": "kda", "qk_l2_norm": 1},
            2,
        ),
        OF_HEADS.format("b s", " d", ", (k g), (k g d)") + MADE.format("b s", "s d"),
    ),
    (
        case("GatedDeltaNet", delta_net((6,)), outputs=2),
        OF_HEADS.format("(b s)", "", "") + MADE.format("(b s)", "s d"),
    ),
    (
        case("GatedDeltaNet", SEQUENCES, outputs=2),
        OF_HEADS.format("t", "", "") + MADE.format("t", "t d b"),
    ),
    (
        case("GatedDeltaNet", PACKED_NET, outputs=2),
        "(b s) x, _, _, _, (b s) y, (b s) y, b n e d -> (b s) n e; b n e d {whole: s d e x y n}",
    ),
    (
        case("VarlenCausalConvWithState", CONVOLVED, {"activation": "silu"}, 2),
        "t c, c 1 w, _, c, b c p -> t c; b c p {whole: t b w p}",
    ),
    (
        case("AttnLSTM", ATTENDING, {"hidden_size": 3}, 3, weights=(1, 2, 3, 8, 9, 10)),
        "s b i, d v j, d v h, d y, _, d b h, d b h, _, d q n, d x n, d n, b m x"
        " -> s d b h; d b h; d b h {whole: s d i j h v y q n m x}",
    ),
    (
        case("AttnLSTM", [*ATTENDING, array([7, 5, 2, 6], np.int32)], {"hidden_size": 3}, 3),
        "i0_0 i0_1 i0_2, i1_0 i1_1 i1_2, i2_0 i2_1 i2_2, i3_0 i3_1, _, i5_0 i5_1 i5_2,"
        " i6_0 i6_1 i6_2, _, i8_0 i8_1 i8_2, i9_0 i9_1 i9_2, i10_0 i10_1, i11_0 i11_1 i11_2, i12_0"
        " -> o0_0 o0_1 o0_2 o0_3; o1_0 o1_1 o1_2; o2_0 o2_1 o2_2 {whole: i0_0 i0_1 i0_2 i1_0 i1_1"
        " i1_2 i2_0 i2_1 i2_2 i3_0 i3_1 i5_0 i5_1 i5_2 i6_0 i6_1 i6_2 i8_0 i8_1 i8_2 i9_0 i9_1"
        " i9_2 i10_0 i10_1 i11_0 i11_1 i11_2 i12_0 o0_0 o0_1 o0_2 o0_3 o1_0 o1_1 o1_2 o2_0 o2_1"
        " o2_2}",
    ),
    (
        case("MoEGroupRouter", [LOGITS, small(8)], ROUTED),
        "b0 b1 e, e -> (b0 b1) e {whole: e}",
    ),
    (
        case(
            "WordConvEmbedding",
            [WORDS, small(4, 1, 3, 5), small(4), small(9, 5)],
            {"embedding_size": 4, "conv_window_size": 3, "char_embedding_size": 5},
        ),
        "b w, f 1 x c, f, v c -> b f {whole: w x c v}",
    ),
    (
        case("GatherPacked", [TABLE, array([[3, 0, 9], [6, -1, 2]])], PLAIN, weights=[0]),
        "v w, i0 i1 -> i0 i1 k {sum: v, whole: w k}",
    ),
    (
        case(
            "MatMulFpQ4",
            [small(3, 4, 64), BLOCKS, array([64, 6])],
            {"blk_quant_type": 0},
            weights=[1, 2],
        ),
        "m0 m1 k, _, _ -> m0 m1 n {whole: k n}",
    ),
]


def marked(case, text):
    marks = [four_bit_floats] if case.op == "MatMulFpQ4" else []
    return pytest.param(case, text, id=case.op, marks=marks)


@pytest.mark.parametrize(("case", "text"), [marked(*each) for each in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
