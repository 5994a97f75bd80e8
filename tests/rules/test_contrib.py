"""Rules of onnxruntime's own ops."""

import numpy as np
import onnxruntime as ort
import pytest
from numpy import array
from processor import blocks_of_16, exact_int8

from onnxpar.rules.contrib_whole_ops import REASONS
from onnxpar.rules.rule import registered, whole_ops
from onnxpar.testing.case import Case

STATE = ort.capi.onnxruntime_pybind11_state

MS = "com.microsoft"
RNG = np.random.default_rng(0)


def case(op, operands, attrs=None, **fields):
    return Case(op, operands, attrs or {}, domain=MS, **fields)


def blocked(op, operands, attrs):
    """A case of an op on channels in blocks, which onnxruntime's CPU kernels of that domain run."""
    return Case(op, operands, attrs, domain="com.microsoft.nchwc")


X, QKV, BIAS = (3, 4, 6), (6, 24), (24,)
Q3, K3, V3 = (3, 4, 8), (3, 5, 8), (3, 5, 12)
PAST = (2, 3, 2, 5, 4)
ENDS = array([4, 2, 3, 1, 0, 0], np.int32)
TOTALS = array([[1] * 11, [0] + [1] * 10, [1] * 8 + [0] * 3], np.int32)
LENGTHS = array([4, 2, 3], np.int32)
MASK = array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], np.int32)
LEFT = array([[0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]], np.int32)
SHOWN = RNG.integers(0, 2, (3, 4, 5)).astype(np.int32) * array([[[1], [1], [0], [1]]], np.int32)
GQA = {"num_heads": 4, "kv_num_heads": 2}
CACHE = [(2, 2, 6, 8), (2, 2, 6, 8)]
WIDE = [np.cos(np.linspace(0, 3, 72, dtype=np.float32)).reshape(9, 8)] * 2
AFTER_3 = array([3], np.int32)
SEQLENS, TOTAL = array([6, 5], np.int32), array(7, np.int32)
PROMPT = array([3, 2], np.int32), array(4, np.int32)
TURN = [np.cos(np.linspace(0, 3, 36, dtype=np.float32)).reshape(9, 4)] * 2
PLACES = array([[0, 1, 2, 7], [4, 1, 3, 6]])
COLUMNS = "(n d) + (n d) + (n e)"

ATTENTION = [
    (
        case("Attention", [X, QKV, BIAS], {"num_heads": 2}),
        f"b s h, h {COLUMNS}, {COLUMNS} -> b s (n e) {{communicating: h s, whole: d}}",
    ),
    (  # one query sees no key
        case("Attention", [X, QKV, BIAS, LEFT], {"num_heads": 4, "unidirectional": 1}, fed=[3]),
        f"b s h, h {COLUMNS}, {COLUMNS}, b t -> b s (n e) {{communicating: h s, whole: d t}}",
    ),
    (
        case("Attention", [X, QKV, BIAS, LENGTHS], {"num_heads": 2}, fed=[3]),
        f"b s h, h {COLUMNS}, {COLUMNS}, b -> b s (n e) {{communicating: h s, whole: d}}",
    ),
    (
        case("Attention", [X, QKV, BIAS, ENDS], {"num_heads": 2}, fed=[3]),
        f"b s h, h {COLUMNS}, {COLUMNS}, _ -> b s (n e) {{whole: d b h s}}",
    ),
    (
        case(
            "Attention",
            [X, (6, 20), (20,), None, None, (3, 2, 4, 4)],
            {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 4]},
        ),
        f"b s h, h {COLUMNS}, {COLUMNS}, _, _, b n s t -> b s (n e)"
        " {communicating: h s, whole: d t}",
    ),
    (
        case(
            "Attention",
            [X, QKV, None, SHOWN[..., :4], None, (1, 2, 4, 4)],
            {"num_heads": 2, "unidirectional": 1, "mask_filter_value": -50.0, "scale": 0.3},
            fed=[3],
        ),
        f"b s h, h {COLUMNS}, _, b s t, _, 1 n s t -> b s (n e) {{communicating: h s, whole: d t}}",
    ),
    (
        case("Attention", [X, QKV, BIAS, None, PAST], {"num_heads": 2}, outputs=2),
        f"b s h, h {COLUMNS}, {COLUMNS}, _, z b n p d -> b s (n e); z b n u d"
        " {communicating: h s, whole: d z p u e}",
    ),
    (
        case(
            "Attention",
            [X, QKV, BIAS, TOTALS[:, :9], PAST],
            {"num_heads": 2, "unidirectional": 1},
            fed=[3],
            outputs=2,
        ),
        f"b s h, h {COLUMNS}, {COLUMNS}, b t, z b n p d -> b s (n e); z b n u d"
        " {communicating: h s, whole: d z p t u e}",
    ),
    (
        case(
            "Attention",
            [(3, 1, 6), QKV, BIAS, None, PAST],
            {"num_heads": 2, "unidirectional": 1},
            outputs=2,
        ),
        f"b 1 h, h {COLUMNS}, {COLUMNS}, _, z b n p d -> b s (n e); z b n u d"
        " {communicating: h s, whole: d z p u e}",
    ),
    (
        case("MultiHeadAttention", [Q3, K3, V3], {"num_heads": 4}),
        "b s (n d), b t (n d), b t (n e) -> b s (n e) {communicating: t, whole: d}",
    ),
    (  # the last query sees all keys, also those behind it
        case("MultiHeadAttention", [Q3, K3, V3], {"num_heads": 4, "unidirectional": 1}),
        "b s (n d), b t (n d), b t (n e) -> b s (n e) {communicating: t, whole: d}",
    ),
    (
        case(
            "MultiHeadAttention",
            [Q3, K3, V3, (28,), array([[1] * 5, [1, 1, 1, 0, 0], [1] * 5], np.int32)],
            {"num_heads": 2},
            fed=[4],
        ),
        f"b s (n d), b t (n d), b t (n e), {COLUMNS}, b t -> b s (n e)"
        " {communicating: t, whole: d}",
    ),
    (  # one query sees no key
        case(
            "MultiHeadAttention",
            [Q3, K3, V3, None, SHOWN, (3, 1, 4, 5)],
            {"num_heads": 2, "scale": 0.7},
            fed=[4],
            outputs=3,
        ),
        "b s (n d), b t (n d), b t (n e), _, b s t, b 1 s t"
        " -> b s (n e); b n t d; b n t e {communicating: t, whole: d}",
    ),
    (
        case(
            "MultiHeadAttention",
            [Q3, Q3, Q3, (24,), LENGTHS],
            {"num_heads": 2, "unidirectional": 1},
            fed=[4],
        ),
        f"b s (n d), b t (n d), b t (n e), {COLUMNS}, b -> b s (n e)"
        " {communicating: t, whole: d}",
    ),
    (
        case(
            "MultiHeadAttention",
            [Q3, Q3, Q3, None, MASK, (1, 2, 4, 4)],
            {"num_heads": 2, "unidirectional": 1, "mask_filter_value": -50.0},
            fed=[4],
        ),
        "b s (n d), b t (n d), b t (n e), _, b t, 1 n s t -> b s (n e)"
        " {communicating: t, whole: d}",
    ),
    (
        case(
            "MultiHeadAttention",
            [Q3, K3, K3, None, None, (1, 2, 4, 11), (3, 2, 6, 4), (3, 2, 6, 4)],
            {"num_heads": 2},
            outputs=3,
        ),
        "b s (n d), b t (n d), b t (n e), _, _, 1 n s u, b n p d, b n p e"
        " -> b s (n e); b n u d; b n u e {whole: d e p t u}",
    ),
    (
        case(
            "MultiHeadAttention",
            [Q3, K3, K3, None, TOTALS, None, (3, 2, 6, 4), (3, 2, 6, 4)],
            {"num_heads": 2},
            fed=[4],
            outputs=3,
        ),
        "b s (n d), b t (n d), b t (n e), _, b u, _, b n p d, b n p e"
        " -> b s (n e); b n u d; b n u e {whole: d e p t u}",
    ),
    (
        case("MultiHeadAttention", [Q3, (3, 2, 5, 4), (3, 2, 5, 4)], {"num_heads": 2}),
        "b s (n d), b n t d, b n t e -> b s (n e) {communicating: t, whole: d e}",
    ),
    (
        case(
            "DecoderMaskedMultiHeadAttention",
            [*[(3, 1, 8)] * 3, None, None, *[(3, 2, 6, 4)] * 2, AFTER_3],
            {"num_heads": 2, "past_present_share_buffer": 1},
            fed=[7],
            outputs=3,
        ),
        "b s (n d), b s (n d), b s (n e), _, _, b n p d, b n p e, _"
        " -> b s (n e); b n p d; b n p e {whole: d e p}",
    ),
    (
        case(
            "DecoderMaskedMultiHeadAttention",
            [*[(3, 1, 8)] * 3, None, (1, 2, 1, 4), *[(3, 2, 6, 4)] * 2, AFTER_3, None, None, (24,)],
            {"num_heads": 2, "past_present_share_buffer": 1},
            fed=[7],
            outputs=3,
        ),
        f"b s (n d), b s (n d), b s (n e), _, 1 n 1 m, b n p d, b n p e, _, _, _, {COLUMNS}"
        " -> b s (n e); b n p d; b n p e {whole: d e m p}",
    ),
    (
        case(
            "DecoderMaskedMultiHeadAttention",
            [(3, 1, 8), (3, 2, 5, 4), (3, 2, 5, 4), array([[1] * 5] * 3, np.int32)],
            {"num_heads": 2},
            fed=[3],
        ),
        "b s (n d), b n t d, b n t e, b m -> b s (n e) {whole: d e m t}",
    ),
    (
        case(
            "GroupQueryAttention",
            [(2, 1, 32), (2, 1, 16), (2, 1, 16), *CACHE, SEQLENS[:, None], TOTAL],
            GQA,
            fed=[5],
            outputs=3,
        ),
        "b s (k g d), b t (k d), b t (k d), b k p d, b k p d, b 1, _"
        " -> b s (k g d); b k u d; b k u d {whole: s d p t u}",
    ),
    (
        case(
            "GroupQueryAttention",
            [(2, 1, 32), (2, 1, 16), (2, 1, 16), *CACHE, SEQLENS, TOTAL],
            GQA,
            fed=[5],
            outputs=3,
        ),
        "b s (k g d), b t (k d), b t (k d), b k p d, b k p d, b, _"
        " -> b s (k g d); b k u d; b k u d {whole: s d p t u}",
    ),
    (
        case(
            "GroupQueryAttention",
            [
                (2, 4, 128),
                *([None] * 4),
                array([3, 2], np.int32),
                array(4, np.int32),
                *WIDE,
                None,
                (1, 4, 4, 4),
            ],
            {**GQA, "do_rotary": 1},
            fed=[5],
            outputs=3,
        ),
        "b s (k g d) + (k d) + (k d), _, _, _, _, b, _, m r, m r, _, 1 (k g) s t"
        " -> b s (k g d); b k u d; b k u d {whole: s d t u m r}",
    ),
    (
        case("RotaryEmbedding", [(2, 4, 24), PLACES, *TURN], fed=[1]),
        "b s (h d), b s, m r, m r -> b s (h d) {whole: d r m}",
    ),
    (
        case("RotaryEmbedding", [(2, 3, 4, 8), array([2]), *TURN], fed=[1]),
        "b h s d, 1, m r, m r -> b h s d {whole: d r m s}",
    ),
    (
        case(
            "RotaryEmbedding",
            [(2, 4, 24), PLACES, TURN[0][:, :2], TURN[0][:, 2:]],
            {"num_heads": 3, "rotary_embedding_dim": 4},
            fed=[1],
        ),
        "b s (h d), b s, m r, m r -> b s (h d) {whole: d r m}",
    ),
    (
        case(
            "QAttention",
            [
                RNG.integers(0, 255, X, np.uint8),
                RNG.integers(0, 255, QKV, np.uint8),
                BIAS,
                array(0.02, np.float32),
                np.linspace(0.01, 0.03, 24, dtype=np.float32),
                LENGTHS,
                array(120, np.uint8),
                RNG.integers(120, 130, 24, np.uint8),
            ],
            {"num_heads": 4},
            fed=[0, 5],
        ),
        f"b s h, h {COLUMNS}, {COLUMNS}, _, {COLUMNS}, b, _, {COLUMNS} -> b s (n e)"
        " {communicating: h s, whole: d e}",
    ),
    (
        case(
            "QAttention",
            [
                RNG.integers(0, 255, X, np.uint8),
                RNG.integers(-100, 100, QKV, np.int8),
                BIAS,
                array(0.02, np.float32),
                array(0.01, np.float32),
                None,
                array(120, np.uint8),
                array(3, np.int8),
                PAST,
            ],
            {"num_heads": 2, "unidirectional": 1},
            fed=[0],
            outputs=2,
        ),
        f"b s h, h {COLUMNS}, {COLUMNS}, _, _, _, _, _, z b n p d -> b s (n e); z b n u d"
        " {communicating: h s, whole: d z p u e}",
    ),
]


def marked(case, text):
    marks = [exact_int8] if case.op == "QAttention" else []
    return pytest.param(case, text, id=case.op, marks=marks)


@pytest.mark.parametrize(("case", "text"), [marked(*each) for each in ATTENTION])
def test_attention(prove_rule, case, text):
    prove_rule(case, text)


def u8(*shape, low=0, high=255):
    return RNG.integers(low, high, shape, np.uint8)


def f32(*values):
    return array(values if len(values) > 1 else values[0], np.float32)


SCALE, HALF, ZERO = f32(0.02), f32(0.5), array(3, np.uint8)
SIX = np.linspace(0.01, 0.03, 6, dtype=np.float32)
ADDED = array([[5, 90, -7, 3, 2, 8]], np.int32)
SCALES = np.full((3, 32), 0.1, np.float32)
BITS = {"N": 6, "K": 64, "bits": 4, "block_size": 16}
BLOCKS = f32(*np.linspace(0.1, 0.3, 24)).reshape(6, 4)

PRODUCTS = [
    (
        case("FusedMatMul", [(2, 4, 6), (2, 5, 6)], {"transB": 1, "alpha": 0.5}),
        "b0 m k, b0 n k -> b0 m n {sum: k}",
    ),
    (case("FusedMatMul", [(6, 4), (6, 5)], {"transA": 1}), "k m, k n -> m n {sum: k}"),
    (
        case("MatMulInteger16", [array([[1, -2, 3]] * 4, np.int16), u8(3, 6).astype(np.int16)]),
        "m k, k n -> m n {sum: k}",
    ),
    (
        case("MatMulNBits", [(2, 3, 64), u8(6, 4, 8), BLOCKS], BITS),
        "m0 m1 (k z i), n (k z) w, n (k z) -> m0 m1 n {sum: k, whole: w i z}",
    ),
    (
        case("MatMulNBits", [(3, 64), u8(6, 4, 8), BLOCKS, u8(6, 2)], BITS),
        "m0 (k z i), n (k z) w, n (k z), n k -> m0 n {sum: k, whole: w i z}",
    ),
    (
        case("MatMulNBits", [(3, 64), u8(6, 4, 8), BLOCKS.reshape(24), u8(12)], BITS),
        "m0 (k z i), n (k z) w, (n k z), (n k) -> m0 n {sum: k, whole: w i z}",
    ),
    (
        case("MatMulNBits", [(3, 64), u8(6, 4, 8), BLOCKS, BLOCKS + 5], BITS),
        "m0 (k z i), n (k z) w, n (k z), n (k z) -> m0 n {sum: k, whole: w i z}",
    ),
    (
        case("MatMulNBits", [(3, 56), u8(6, 4, 8), BLOCKS, u8(6, 2)], {**BITS, "K": 56}),
        "m0 c, n b w, n b, n y -> m0 n {whole: c b y w}",
    ),
    (
        case("MatMulNBits", [(3, 48), u8(6, 3, 8), BLOCKS[:, :3], u8(12)], {**BITS, "K": 48}),
        "m0 c, n b w, n b, (n y) -> m0 n {whole: c b y w}",
    ),
    (
        case("MatMulNBits", [(3, 64), u8(6, 4, 16), BLOCKS, u8(6, 4)], {**BITS, "bits": 8}),
        "m0 (k z i), n (k z) w, n (k z), n k -> m0 n {sum: k, whole: w i z}",
    ),
    (
        case(
            "QGemm",
            [
                u8(4, 6),
                SCALE,
                ZERO,
                u8(6, 6),
                SIX,
                u8(6),
                array([[5, 90, -7, 3, 2, 8]], np.int32),
                HALF,
                ZERO,
            ],
            fed=[0, 3],
        ),
        "m k, _, _, k n, n, n, 1 n, _, _ -> m n {communicating: k}",
    ),
    (
        case(
            "QGemm",
            [u8(6, 4), SCALE, ZERO, u8(5, 6), SCALE, ZERO],
            {"transA": 1, "transB": 1, "alpha": 0.3},
            fed=[0, 3],
        ),
        "k m, _, _, n k, (), () -> m n {communicating: k}",
    ),
    (
        case(
            "QMoE",
            [(6, 32), (6, 3), u8(3, 32, 16), SCALES, None, u8(3, 32, 16), SCALES],
            {"k": 2, "activation_type": "relu"},
        ),
        "t h, t r, e (f i) p2, e (f i), _, e h (f p5), e h -> t h "
        "{sum: e, sum: f, whole: h r i p2 p5}",
    ),
]


@pytest.mark.parametrize(("case", "text"), PRODUCTS, ids=[c.op for c, _ in PRODUCTS])
def test_products(prove_rule, case, text):
    prove_rule(case, text)


Q, W8 = u8(3, 4, 6), u8(4, 6)
IMAGE, PIXELS = u8(2, 4, 6, 6), u8(2, 6, 6, 4)
SCALED = [SCALE, ZERO, f32(0.03), array(7, np.uint8)]
POOL = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}
IDS, KINDS = array([[1, 4, 2], [7, 0, 3]], np.int32), array([[0, 1, 1], [0, 0, 1]], np.int32)
TABLES = [RNG.standard_normal((rows, 8)).astype(np.float32) for rows in (9, 5, 2)]
ROW = [RNG.standard_normal(8).astype(np.float32)] * 2


def quantized(values):
    """Values near those of a table, with the scale and the zero point of `SCALE` and `ZERO`."""
    return np.clip(values / 0.02 + 3, 0, 255).astype(np.uint8)


ROIS = array([[0.1, 0.2, 0.9, 0.8], [0, 0, 1, 1], [0.3, 0.3, 0.6, 1]], np.float32)

PADDED_BY_NODES = "i0_0 i0_1, i1_0 -> o0_0 o0_1 {whole: i0_0 i0_1 i1_0 o0_0 o0_1}"

ELEMENTS = [
    (case("Gelu", [(4, 6)]), "d0 d1 -> d0 d1"),
    (case("FastGelu", [(3, 4, 6), (6,)]), "d0 d1 d2, d2 -> d0 d1 d2"),
    (case("FastGelu", [(3, 4, 6)]), "d0 d1 d2 -> d0 d1 d2"),
    (case("QuickGelu", [(4, 6)], {"alpha": 1.2}), "d0 d1 -> d0 d1"),
    (case("BiasGelu", [(3, 4, 6), (6,)]), "d0 d1 d2, d2 -> d0 d1 d2"),
    (
        case("QLinearAdd", [Q, SCALE, ZERO, W8, SCALE, ZERO, HALF, ZERO], fed=[0, 3]),
        "d0 d1 d2, (), (), d1 d2, (), (), (), () -> d0 d1 d2",
    ),
    (
        case("QLinearMul", [Q, SCALE, ZERO, u8(3, 1, 6), SCALE, ZERO, HALF, ZERO], fed=[0, 3]),
        "d0 d1 d2, (), (), d0 1 d2, (), (), (), () -> d0 d1 d2",
    ),
    (case("QLinearSigmoid", [W8, *SCALED], fed=[0]), "d0 d1, (), (), (), () -> d0 d1"),
    (
        case("QLinearLeakyRelu", [W8, *SCALED], {"alpha": 0.1}, fed=[0]),
        "d0 d1, (), (), (), () -> d0 d1",
    ),
    (
        case(
            "QLinearWhere",
            [W8 > 99, Q, SCALE, ZERO, W8, HALF, ZERO, HALF, ZERO],
            fed=[0, 1, 4],
        ),
        "d1 d2, d0 d1 d2, (), (), d1 d2, (), (), (), () -> d0 d1 d2",
    ),
    (
        case(
            "QLinearConcat",
            [HALF, ZERO, Q, SCALE, ZERO, u8(3, 5, 6), HALF, ZERO],
            {"axis": 1},
            fed=[2, 5],
        ),
        "_, _, d0 s0 d2, _, _, d0 s1 d2, _, _ -> d0 s0 + s1 d2",
    ),
    (
        case("QLinearSoftmax", [Q, *SCALED], {"axis": -1, "opset": 13}, fed=[0]),
        "d0 d1 d2, _, _, _, _ -> d0 d1 d2 {whole: d2}",
    ),
    (
        case("QLinearSoftmax", [Q, *SCALED], {"axis": 1, "opset": 12}, fed=[0]),
        "d0 d1 d2, _, _, _, _ -> d0 d1 d2 {whole: d1 d2}",
    ),
    (
        case("DequantizeLinear", [W8, SIX, u8(6)], {"axis": 1}, fed=[0]),
        "d0 d1, d1, d1 -> d0 d1",
    ),
    # the kernel reads past the end of a matrix that is not square, as a half of it would be
    (case("Inverse", [(4, 1, 1)]), "d0 d1 d2 -> d0 d1 d2 {whole: d1 d2}"),
    (case("Trilu", [(4, 3, 3)]), "d0 d1 d2 -> d0 d1 d2"),
    (case("Trilu", [(4, 5), array(1)], {"upper": 0}), "d0 d1, _ -> d0 d1"),
    (
        case("Pad", [(4, 5), array([1, 0, 2, 1])], {"mode": "constant"}),
        "d0 d1, _ -> y0 y1 {communicating: d0 d1, co-sharded: d0 y0, co-sharded: d1 y1}",
    ),
    (case("Pad", [(4, 5), array([1, 0, 2, 1])], fed=[1]), PADDED_BY_NODES),
    (
        case("CDist", [(4, 6), (5, 6)], {"metric": "euclidean"}),
        "m k, n k -> m n {communicating: k}",
    ),
    (case("CDist", [(4, 6), (5, 6)]), "m k, n k -> m n {sum: k}"),
    (case("ExpandDims", [(4, 6), array(1, np.int32)]), "d0 d1, _ -> d0 1 d1"),
    (
        case("UnfoldTensor", [(4, 7, 3)], {"dim": 1, "size": 3, "step": 2}),
        "d0 h0 d2 -> d0 y0 d2 z {communicating: h0, co-sharded: h0 y0, whole: z}",
    ),
    (
        case("UnfoldTensor", [(4, 7)], {"size": 3}),
        "d0 h0 -> d0 y0 z {communicating: h0, co-sharded: h0 y0, whole: z}",
    ),
    (
        case(
            "NGramRepeatBlock",
            [array([[1, 2, 1], [3, 3, 3], [0, 1, 2]]), (3, 5)],
            {"ngram_size": 2},
            fed=[0],
        ),
        "b s, b v -> b v {whole: s v}",
    ),
    (
        Case("SimplifiedLayerNormalization", [(3, 4, 6), (6,)], {"axis": -1}, outputs=2),
        "d0 d1 d2, d2 -> d0 d1 d2; d0 d1 1 {communicating: d2}",
    ),
    (
        case("EmbedLayerNormalization", [IDS, KINDS, *TABLES, *ROW], fed=[0, 1], outputs=3),
        "b s, b s, v h, p h, t h, h, h -> b s h; b; b s h {communicating: h p s t v}",
    ),
    (
        case(
            "EmbedLayerNormalization",
            [IDS, None, *TABLES[:2], None, *ROW, None, array([[2, 0, 4]], np.int32)],
            fed=[0, 8],
            outputs=2,
        ),
        "b s, _, v h, p h, _, h, h, _, 1 s -> b s h; b {communicating: h p s v}",
    ),
    (
        case(
            "EmbedLayerNormalization",
            [IDS, KINDS, *TABLES, *ROW, KINDS],
            {"mask_index_type": 1},
            fed=[0, 1, 7],
            outputs=2,
        ),
        "b s, b s, v h, p h, t h, h, h, b s -> b s h; b {communicating: h p s t v}",
    ),
    (
        case(
            "EmbedLayerNormalization",
            [IDS, KINDS, *TABLES, *ROW, KINDS, IDS % 5],
            {"mask_index_type": 1},
            fed=[0, 1, 7, 8],
            outputs=2,
        ),
        "b s, b s, v h, p h, t h, h, h, b s, b s -> b s h; b {communicating: h p s t v}",
    ),
    (
        case(
            "QEmbedLayerNormalization",
            [IDS, KINDS, *map(quantized, (*TABLES, *ROW)), KINDS, *[SCALE] * 5, *[ZERO] * 5],
            fed=[0, 1, 7],
            outputs=2,
        ),
        "b s, b s, v h, p h, t h, h, h, b s, _, _, _, _, _, _, _, _, _, _ -> b s h; b"
        " {communicating: h p s t v}",
    ),
    (
        case(
            "GatherBlockQuantized",
            [
                u8(7, 16),
                array([[1, 4, 6], [0, 2, 5]]),
                f32(*np.linspace(0.1, 0.3, 14)).reshape(7, 2),
            ],
            {"block_size": 16, "bits": 4, "gather_axis": 0, "quantize_axis": 1},
            fed=[1],
        ),
        "v (k z w), i0 i1, v (k z) -> i0 i1 (k z e) {sum: v, whole: w e z}",
    ),
    (  # two blocks share a byte of zero points
        case(
            "GatherBlockQuantized",
            [
                u8(7, 32),
                array([6, 0, 2, -1]),
                np.linspace(0.1, 0.3, 28, dtype=np.float32).reshape(7, 4),
                u8(7, 2),
            ],
            {"block_size": 16, "bits": 4, "gather_axis": 0, "quantize_axis": 1},
            fed=[1],
        ),
        "v (k z w), i0, v (k z), v k -> i0 (k z e) {sum: v, whole: w e z}",
    ),
    (
        case(
            "GatherBlockQuantized",
            [
                u8(5, 3, 32),
                array([4, 1]),
                np.linspace(0.1, 0.3, 30, dtype=np.float32).reshape(5, 3, 2),
            ],
            {"block_size": 16, "bits": 8, "gather_axis": 0, "quantize_axis": 2},
            fed=[1],
        ),
        "v d1 (k z w), i0, v d1 (k z) -> i0 d1 (k z e) {sum: v, whole: w e z}",
    ),
]
WINDOWED = "{communicating: h0 h1, co-sharded: h0 y0, co-sharded: h1 y1}"
IMAGES = [
    (
        case("NhwcMaxPool", [PIXELS], POOL, fed=[0]),
        f"n h0 h1 c -> n y0 y1 c {WINDOWED}",
    ),
    (
        case("QLinearAveragePool", [IMAGE, *SCALED], POOL, fed=[0]),
        f"n c h0 h1, _, _, _, _ -> n c y0 y1 {WINDOWED}",
    ),
    (
        case("QLinearAveragePool", [PIXELS, *SCALED], {**POOL, "channels_last": 1}, fed=[0]),
        f"n h0 h1 c, _, _, _, _ -> n y0 y1 c {WINDOWED}",
    ),
    (
        case("QLinearGlobalAveragePool", [IMAGE, SCALE, ZERO, f32(0.011), ZERO], fed=[0]),
        "n c h0 h1, _, _, _, _ -> n c 1 1 {communicating: h0 h1}",
    ),
    (
        case("QLinearGlobalAveragePool", [PIXELS, *SCALED], {"channels_last": 1}, fed=[0]),
        "n h0 h1 c, _, _, _, _ -> n 1 1 c {communicating: h0 h1}",
    ),
    (
        case(
            "QLinearConv",
            [PIXELS, SCALE, ZERO, u8(6, 2, 3, 3), SIX, array(5, np.uint8), HALF, ZERO, ADDED[0]],
            {"channels_last": 1, "group": 2},
            fed=[0, 3],
        ),
        "n h0 h1 (g c), _, _, (g o) c w0 w1, (g o), (), _, _, (g o) -> n y0 y1 (g o)"
        " {communicating: c h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        case(
            "QLinearConv",
            [PIXELS, SCALE, ZERO, u8(4, 4, 2, 3), SCALE, array(5, np.uint8), HALF, ZERO],
            {"channels_last": 1, "strides": [2, 1], "pads": [0, 1, 0, 1]},
            fed=[0, 3],
        ),
        "n h0 h1 c, _, _, o c w0 w1, (), (), _, _ -> n y0 y1 o"
        " {communicating: c h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        case(
            "QLinearConv",
            [IMAGE, SCALE, ZERO, u8(6, 4, 3, 3), SIX, array(5, np.uint8), HALF, ZERO, ADDED[0]],
            {"pads": [1, 1, 1, 1]},
            fed=[0, 3],
        ),
        "n c h0 h1, _, _, o c w0 w1, o, (), _, _, o -> n o y0 y1"
        " {communicating: c h0 h1, co-sharded: h0 y0, co-sharded: h1 y1, whole: w0 w1}",
    ),
    (
        case("ConvTransposeWithDynamicPads", [(2, 4, 5), (4, 6, 3), array([1, 1]), (6,)]),
        "n c h0, c o w0, _, o -> n o y0 {sum: c, whole: h0 y0 w0}",
    ),
    (
        case("ConvTransposeWithDynamicPads", [(2, 4, 5), (4, 3, 3), array([1, 1])], {"group": 2}),
        "n (g c) h0, (g c) o w0, _ -> n (g o) y0 {sum: c, whole: h0 y0 w0}",
    ),
    (
        case(
            "GridSample", [(2, 3, 4, 5), np.sin(np.arange(48.0)).reshape(2, 3, 4, 2).astype("f4")]
        ),
        "n c h w, n y x z -> n c y x {whole: h w z}",
    ),
    (
        case(
            "CropAndResize",
            [(2, 3, 6, 6), ROIS, array([0, 1, 0], np.int32), array([3, 2], np.int32)],
            fed=[1, 2],
        ),
        "n c h w, r z, r, _ -> r c y x {whole: n h w z y x}",
    ),
    (
        case(
            "MaxpoolWithMask",
            [(2, 3, 6, 6), RNG.integers(0, 2, (1, 1, 6, 6)).astype(np.int32)],
            {"kernel_shape": [2, 2], "strides": [2, 2]},
            fed=[1],
        ),
        "n c h0 h1, 1 1 h0 h1 -> n c y0 y1 {whole: h0 y0 h1 y1}",
    ),
    (
        case(
            "MaxpoolWithMask",
            [(2, 3, 7), RNG.integers(0, 2, (1, 1, 7)).astype(np.int32)],
            {"kernel_shape": [3], "strides": [2], "pads": [1, 1]},
            fed=[1],
        ),
        "n c h0, 1 1 h0 -> n c y0 {communicating: h0, co-sharded: h0 y0}",
    ),
    (  # image q reads the mask from element `7 q % 6` on
        case(
            "MaxpoolWithMask",
            [(2, 3, 7), RNG.integers(0, 2, (2, 3, 7)).astype(np.int32)],
            {"kernel_shape": [3]},
            fed=[1],
        ),
        "i0_0 i0_1 i0_2, i1_0 i1_1 i1_2 -> o0_0 o0_1 o0_2"
        " {whole: i0_0 i0_1 i0_2 i1_0 i1_1 i1_2 o0_0 o0_1 o0_2}",
    ),
]

BLOCKED = [
    (
        blocked("Conv", [(3, 16, 4, 4), (16, 16, 3, 3)], {"kernel_shape": [3, 3], "pads": [1] * 4}),
        "n h0 h1 h2, _ -> n y0 y1 y2 {whole: h0 h1 h2 y0 y1 y2}",
    ),
    (
        blocked(
            "Conv",
            [(3, 16, 4, 4), (16, 16, 1, 1), (16,), (3, 16, 4, 4)],
            {"kernel_shape": [1, 1], "activation": "Relu"},
        ),
        "n h0 h1 h2, _, _, n y0 y1 y2 -> n y0 y1 y2 {whole: h0 h1 h2 y0 y1 y2}",
    ),
    *(
        (blocked(op, [(3, 16, 4, 4)], attrs), "n h0 h1 h2 -> n y0 y1 y2 {whole: h0 h1 h2 y0 y1 y2}")
        for op, attrs in (
            ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]}),
            ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2]}),
            ("GlobalMaxPool", {}),
            ("GlobalAveragePool", {}),
            ("Upsample", {"scales": [1, 1, 2, 2]}),
            ("ReorderInput", {}),
            ("ReorderOutput", {"channels": 12}),
        )
    ),
]

ROWS = [
    (case("MurmurHash3", [array([[3, 1, 4], [1, 5, 9]], np.int32)], fed=[0]), "d0 d1 -> d0 d1"),
    (case("SampleOp", [X]), "d0 d1 d2 -> d0 d1 d2"),
    (case("ScaledSiLU", [X], {"alpha": 1.5}), "d0 d1 d2 -> d0 d1 d2"),
    (case("ScaledSiLU", [X, array(0.7, np.float32)]), "d0 d1 d2, () -> d0 d1 d2"),
    (case("GatedAdd", [X, X, (3, 4, 1)]), "d0 d1 d2, d0 d1 d2, d0 d1 1 -> d0 d1 d2"),
    (case("TransposeMatMul", [(4, 6), (5, 6)], {"transB": 1}), "m k, n k -> m n {sum: k}"),
    (
        case("BranchwiseRMSNorm", [X, (24,)]),
        "d0 c h, (c h) -> d0 c h {communicating: h}",
    ),
    (
        case("BranchwiseRMSNorm", [(2, 3, 4, 6), (4, 6)], {"epsilon": 0.1}),
        "d0 d1 c h, c h -> d0 d1 c h {communicating: h}",
    ),
    (case("BranchwiseRMSNorm", [X]), "d0 c h -> d0 c h {communicating: h}"),
    (
        case("BranchwiseRMSNorm", [(3, 4, 12), (6,)], {"num_branches": 2}),
        "d0 d1 (c h), h -> d0 d1 (c h) {communicating: h}",
    ),
    (
        case("BranchwiseRMSNorm", [(3, 4, 12), (12,)], {"num_branches": 2}),
        "d0 d1 (c h), (c h) -> d0 d1 (c h) {communicating: h}",
    ),
    (
        case("GatedRMSNorm", [X, (6,), X]),
        "d0 d1 c, c, d0 d1 c -> d0 d1 c {communicating: c}",
    ),
    (
        case("GatedRMSNorm", [X, (3,), X], {"activation": "sigmoid", "epsilon": 0.1}),
        "d0 d1 (n c), c, d0 d1 (n c) -> d0 d1 (n c) {communicating: c}",
    ),
    (
        case("LinearAttentionGate", [X, (6,), (6,), X], outputs=2),
        "d0 d1 d2, d2, d2, d0 d1 d2 -> d0 d1 d2; d0 d1 d2",
    ),
]


@pytest.mark.parametrize(("case", "text"), ELEMENTS, ids=[c.op for c, _ in ELEMENTS])
def test_elements(prove_rule, case, text):
    prove_rule(case, text)


@pytest.mark.parametrize(("case", "text"), ROWS, ids=[c.op for c, _ in ROWS])
def test_rows(prove_rule, case, text):
    prove_rule(case, text)


@blocks_of_16
@pytest.mark.parametrize(("case", "text"), BLOCKED, ids=[c.op for c, _ in BLOCKED])
def test_channels_in_blocks(prove_rule, case, text):
    prove_rule(case, text)


@pytest.mark.parametrize(("case", "text"), IMAGES, ids=[c.op for c, _ in IMAGES])
def test_images(prove_rule, case, text):
    prove_rule(case, text)


def test_every_op_of_the_runtime_has_a_rule_or_a_reason():
    known = {(s.domain, s.name) for s in STATE.get_all_operator_schema()}
    ours = {key for key in known if key[0] in (MS, "com.microsoft.nchwc")}
    assert ours and ours <= registered().keys() | whole_ops().keys()


def test_ops_that_are_said_to_lack_a_kernel_lack_it():
    kernels = {k.op_name for k in STATE.get_all_opkernel_def() if k.domain == MS}
    assert not kernels & set(REASONS["onnxruntime has no CPU kernel for it"].split())
