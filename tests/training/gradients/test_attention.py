"""Gradients of attention and of rotary embeddings."""

import numpy as np
import onnx
import pytest
from numpy import array

from onnxpar.testing.case import Case
from onnxpar.testing.gradient_proof import Gradient

RNG = np.random.default_rng(8)
LEAST = np.finfo(np.float32).min
CAUSAL = {"is_causal": 1}
FLAT = {"q_num_heads": 4, "kv_num_heads": 2}
SELF = [(2, 3, 4, 2), (2, 3, 4, 2), (2, 3, 4, 2)]
GROUPED = [(2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3)]
SIDE_BY_SIDE = [(2, 3, 8), (2, 5, 4), (2, 5, 6)]
CACHE = [(2, 2, 2, 2), (2, 2, 2, 3)]
SEEN = RNG.random((3, 5)) < 0.6
SEEN[1] = False
HIDDEN = np.where(SEEN, 0, LEAST).astype(np.float32)
HIDDEN[2] = -np.inf


def attention(operands, attrs=None, outputs=1, fed=(), opset=23):
    return Case("Attention", operands, attrs or {}, fed, outputs, opset)


CASES = [
    attention(SELF),
    attention(SELF, {"scale": 0.3}),
    attention(SELF, CAUSAL),
    attention(SELF, {"softcap": 1.5}),
    attention(SELF, {"softcap": 0.7, **CAUSAL}),
    attention(GROUPED),
    attention(GROUPED, CAUSAL),
    attention([(2, 4, 3, 2), (2, 1, 5, 2), (2, 1, 5, 2)]),
    attention(SIDE_BY_SIDE, FLAT),
    attention(SIDE_BY_SIDE, {**FLAT, **CAUSAL, "softcap": 2.0}),
    attention([*GROUPED, SEEN]),
    attention([*GROUPED, SEEN], CAUSAL),
    attention([*GROUPED, SEEN], fed=[3]),
    attention([*GROUPED, RNG.random((2, 1, 3, 5)) < 0.7], fed=[3]),
    attention([*GROUPED, (3, 5)]),
    attention([*GROUPED, (2, 4, 3, 5)], CAUSAL),
    attention([*GROUPED, (2, 1, 3, 5)], {"softcap": 1.0}),
    attention([*SIDE_BY_SIDE, (4, 3, 5)], FLAT),
    attention([*SELF, None, (2, 3, 2, 2), (2, 3, 2, 2)], CAUSAL, outputs=3),
    attention([*GROUPED, None, *CACHE], outputs=3),
    attention([*SIDE_BY_SIDE, (3, 7), *CACHE], {**FLAT, **CAUSAL}, outputs=3),
    attention(GROUPED, outputs=4),
    attention(GROUPED, {"qk_matmul_output_mode": 3, **CAUSAL}, outputs=4),
    attention(GROUPED, {"qk_matmul_output_mode": 1, "softcap": 1.2, **CAUSAL}, outputs=4),
    attention([*GROUPED, (3, 5)], {"qk_matmul_output_mode": 2, "softcap": 1.2}, outputs=4),
    attention([*GROUPED, None, None, None, array([4, 5])], opset=24),
    attention([*GROUPED, None, None, None, array([4, 2])], CAUSAL, opset=24, fed=[6]),
    attention([*GROUPED, (3, 5), None, None, array([4, 3])], CAUSAL, opset=24, fed=[6]),
    attention(SELF, {"left_window_size": 1, **CAUSAL}, opset=25),
    attention([*GROUPED, SEEN], {"left_window_size": 2, "right_window_size": 1}, opset=25),
    attention([*GROUPED, None, *CACHE], {"right_window_size": 0}, outputs=3, opset=25),
    attention(
        [*GROUPED, None, None, None, array([4, 3])],
        {"left_window_size": 0, "right_window_size": 1},
        opset=25,
        fed=[6],
    ),
]


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(prove, case):
    prove(case, results=case.outputs)


def rotary(operands, attrs=None, fed=()):
    return Case("RotaryEmbedding", operands, attrs or {}, fed, opset=23)


IDS = array([[0, 2, 4], [1, 1, 6]])
ROTATIONS = [
    rotary([(2, 4, 3, 6), (2, 3, 3), (2, 3, 3)]),
    rotary([(2, 4, 3, 6), (7, 3), (7, 3), IDS]),
    rotary([(2, 4, 3, 6), (7, 3), (7, 3), IDS], fed=[3]),
    rotary([(2, 4, 3, 6), (2, 3, 3), (2, 3, 3)], {"interleaved": 1}),
    rotary([(2, 4, 3, 6), (7, 2), (7, 2), IDS], {"rotary_embedding_dim": 4}),
    rotary(
        [(2, 3, 24), (2, 3, 2), (2, 3, 2)],
        {"num_heads": 4, "rotary_embedding_dim": 4, "interleaved": 1},
    ),
    rotary([(2, 3, 24), (7, 3), (7, 3), IDS], {"num_heads": 4}, fed=[3]),
    rotary([(0, 4, 3, 6), (0, 3, 3), (0, 3, 3)]),
]


@pytest.mark.parametrize("case", ROTATIONS, ids=str)
def test_rotary_embedding(prove_linear, case):
    prove_linear(case)


def test_a_mask_of_minus_infinity(prove):
    """A row of it sees nothing, and gives zero."""
    mask = np.where(SEEN, RNG.standard_normal(SEEN.shape), -np.inf)
    prove(attention([*GROUPED, mask]), wrt=[0, 1, 2])


def test_a_mask_of_large_numbers(prove):
    """A row of them sees all the same; it is the mean of all values."""
    prove(attention([*GROUPED, np.where(SEEN, 0.0, -1e30)]), wrt=[2])


def test_a_mask_of_the_least_number():
    """As exporters write it: the same as one that says what is seen."""
    found, wanted = (
        Gradient(attention([*GROUPED, mask]), np.float32, [0, 1, 2], 1).run()
        for mask in (np.where(SEEN, 0.0, LEAST), SEEN)
    )
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6)


def test_scores_as_a_result():
    """Before the cap, which onnx's reference hands out behind it."""
    case = attention(GROUPED, {"softcap": 1.2, **CAUSAL}, outputs=4)
    gradient = Gradient(case, np.float32, None, 4)
    found = gradient.run()
    for name, value in gradient.differences(1e-2).items():
        np.testing.assert_allclose(found[name], value, atol=3e-3)


@pytest.mark.parametrize("attrs", [{}, CAUSAL, {"softcap": 2.0}])
@pytest.mark.parametrize("opset", [23, 24, 25])
def test_rows_that_a_mask_of_numbers_hides(opset, attrs):
    """By the least number or by minus infinity: gradients have the probabilities that onnxruntime
    computes in the opset, which values that are an identity show."""
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip("this onnx does not have the opset")
    case = attention([*GROUPED, HIDDEN], attrs, fed=[3], opset=opset)
    gradient = Gradient(case, np.float32, [0, 1, 2], 1)
    q, k, v, mask = (gradient.feeds[f"x{i}"] for i in range(4))
    unit = np.broadcast_to(np.eye(5, dtype=np.float32), (2, 2, 5, 5))
    shown = attention([q, k, unit, mask], attrs, fed=[0, 1, 2, 3], opset=opset)
    p = Gradient(shown, np.float32, [0], 1).whole["y0"]
    dy, scale = gradient.seeds()["dy0"], 1 / np.sqrt(2)
    k, v = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    dp = dy @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    if cap := attrs.get("softcap"):
        ds *= 1 - np.tanh(q @ k.swapaxes(2, 3) * scale / cap) ** 2
    wanted = {
        "d0": ds @ k * scale,
        "d1": (ds.swapaxes(2, 3) @ q * scale).reshape(2, 2, 2, 5, 2).sum(2),
        "d2": (p.swapaxes(2, 3) @ dy).reshape(2, 2, 2, 5, 3).sum(2),
    }
    for name, found in gradient.run().items():
        np.testing.assert_allclose(found, wanted[name], atol=1e-5)
