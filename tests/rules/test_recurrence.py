"""Rules of recurrent networks."""

import numpy as np
import pytest
from numpy import array

from onnxpar.rules.case import Case

X = (3, 4, 5)
CHOSEN = ["Sigmoid", "Tanh", "Relu", "HardSigmoid", "Relu", "Tanh"]
LENGTHS = array([3, 1, 2, 3], np.int32)


def weights(gates: int, directions: int = 1) -> list[tuple[int, ...]]:
    d, g = directions, gates * 6
    return [(d, g, 5), (d, g, 6), (d, 2 * g)]


CASES = [
    (
        Case("LSTM", [X, *weights(4)], {"hidden_size": 6}, outputs=3),
        "s b i, d g i, d g h, d e -> s d b h; d b h; d b h {whole: s i g h e}",
    ),
    (
        Case(
            "LSTM",
            [X, *weights(4, 2), LENGTHS, (2, 4, 6), (2, 4, 6), (2, 18)],
            {"hidden_size": 6, "direction": "bidirectional"},
            fed=[4],
            outputs=3,
        ),
        "s b i, d g i, d g h, d e, b, d b h, d b h, d f"
        " -> s d b h; d b h; d b h {whole: s i g h e f}",
    ),
    (
        Case(
            "LSTM",
            [X, *weights(4, 2)],
            {"hidden_size": 6, "direction": "bidirectional", "activations": CHOSEN},
            outputs=3,
        ),
        "s b i, d g i, d g h, d e -> s d b h; d b h; d b h {whole: s i g h e}",
    ),
    (
        Case(
            "RNN",
            [X, *weights(1, 2)],
            {
                "hidden_size": 6,
                "direction": "bidirectional",
                "activations": ["LeakyRelu", "Tanh"],
                "activation_alpha": [0.3],
            },
            outputs=2,
        ),
        "s b i, d g i, d g h, d e -> s d b h; d b h {whole: s i g h e d}",
    ),
    (
        Case("GRU", [X, *weights(3), None, (1, 4, 6)], {"hidden_size": 6}, outputs=2),
        "s b i, d g i, d g h, d e, _, d b h -> s d b h; d b h {whole: s i g h e}",
    ),
    (
        Case("RNN", [X, *weights(1)[:2]], {"hidden_size": 6}, outputs=2),
        "s b i, d g i, d g h -> s d b h; d b h {whole: s i g h}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
