"""Rules of recurrent networks."""

import math
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from numpy import array
from onnx import TensorProto, helper

import onnxpar
from onnxpar.base.errors import ModelError
from onnxpar.testing.case import Case

X = (3, 4, 5)
BOTH = {"hidden_size": 6, "direction": "bidirectional"}
CHOSEN = ["Sigmoid", "Tanh", "Relu", "HardSigmoid", "Relu", "Tanh"]
LENGTHS = array([3, 1, 0, 2], np.int32)
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def weights(gates: int, directions: int = 1) -> list[tuple[int, ...]]:
    d, g = directions, gates * 6
    return [(d, g, 5), (d, g, 6), (d, 2 * g)]


def text(op: str, others: str = "", whole: str = "s i k") -> str:
    """The rule of an op with a bias and operands behind it, that gives all its results."""
    rows, twice = (" + ".join(["h"] * n) for n in (GATES[op], 2 * GATES[op]))
    states = "; d b h" * (2 if op == "LSTM" else 1)
    return (
        f"s b i, d {rows} i, d {rows} k, d {twice}{others} -> s d b h{states} "
        f"{{communicating: h, whole: {whole}}}"
    )


CASES = {
    "lstm": (Case("LSTM", [X, *weights(4)], {"hidden_size": 6}, outputs=3), text("LSTM")),
    "lstm both ways": (
        Case(
            "LSTM",
            [X, *weights(4, 2), LENGTHS, (2, 4, 6), (2, 4, 6), (2, 18)],
            BOTH,
            fed=[4],
            outputs=3,
        ),
        text("LSTM", ", b, d b h, d b h, d h + h + h"),
    ),
    "lstm with coupled gates": (
        Case(
            "LSTM",
            [X, *weights(4), LENGTHS, (1, 4, 6), (1, 4, 6), (1, 18)],
            {"hidden_size": 6, "direction": "reverse", "clip": 0.4, "input_forget": 1},
            outputs=3,
        ),
        text("LSTM", ", b, d b h, d b h, d h + h + h"),
    ),
    "lstm with chosen activations": (
        Case("LSTM", [X, *weights(4, 2)], {**BOTH, "activations": CHOSEN}, outputs=3),
        text("LSTM"),
    ),
    "gru": (
        Case("GRU", [X, *weights(3), None, (1, 4, 6)], {"hidden_size": 6}, outputs=2),
        text("GRU", ", _, d b h"),
    ),
    "gru that resets behind": (
        Case(
            "GRU",
            [X, *weights(3, 2), LENGTHS, (2, 4, 6)],
            {**BOTH, "linear_before_reset": 1, "clip": 0.5},
            fed=[4],
            outputs=2,
        ),
        text("GRU", ", b, d b h"),
    ),
    "gru with slopes": (
        Case(
            "GRU",
            [X, *weights(3)],
            {
                "hidden_size": 6,
                "direction": "reverse",
                "activations": ["Affine", "ScaledTanh"],
                "activation_alpha": [0.3, 0.7],
                "activation_beta": [0.2, 1.1],
            },
            outputs=2,
        ),
        text("GRU", whole="s i k d"),
    ),
    "rnn with slopes": (
        Case(
            "RNN",
            [X, *weights(1, 2), LENGTHS],
            {**BOTH, "activations": ["LeakyRelu", "Tanh"], "activation_alpha": [0.3], "clip": 1.0},
            outputs=2,
        ),
        text("RNN", ", b", "s i k d"),
    ),
    "rnn without a bias": (
        Case("RNN", [X, *weights(1)[:2]], {"hidden_size": 6}, outputs=2),
        "s b i, d h i, d h k -> s d b h; d b h {communicating: h, whole: s i k}",
    ),
}


@pytest.mark.parametrize(("case", "text"), CASES.values(), ids=CASES)
def test_rule(prove_rule, case, text):
    prove_rule(case, text)


def test_a_network_without_a_number_of_units(tmp_path: Path) -> None:
    """ONNX allows that, but onnxruntime does not load it."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        m (float[5,4,3] x) => (float[5,1,4,6] y) { y = GRU(x, w, r) }""")
    for name, shape in (("w", (1, 18, 3)), ("r", (1, 18, 6))):
        zeros = bytes(4 * math.prod(shape))
        weight = helper.make_tensor(name, TensorProto.FLOAT, shape, zeros, raw=True)
        model.graph.initializer.append(weight)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="has no hidden_size, which onnxruntime requires"):
        onnxpar.plan(tmp_path / "m.onnx", devices=2)
