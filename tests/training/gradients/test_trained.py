"""Which initializers are found to be parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from onnxpar.load.load import load
from onnxpar.load.loading import LoadRequest
from onnxpar.training.gradients.trained import find_trained

RNG = np.random.default_rng(3)


def noise(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


GATES = """
    g0, g1, g2, g3 = Split<axis = 0, num_outputs = 4>(w)
    w_moved = Concat<axis = 0>(g0, g3, g1, g2)
    w3 = Unsqueeze(w_moved, zero)
    r3 = Unsqueeze(r, zero)
    b_both = Concat<axis = 0>(b_in, b_state)
    b2 = Unsqueeze(b_both, zero)
    y = LSTM<hidden_size = 2>(x, w3, r3, b2)
"""

CASES = {
    "bias and scale": (
        "h = Mul(x, s) y = Add(h, b)",
        (4, 6),
        {"s": noise(6), "b": noise(6)},
        "s b",
    ),
    "part of a table": (
        "rows = Slice(t, zero, eight, one) y = Add(x, rows)",
        (2, 3, 8),
        {"t": noise(3, 9)},
        "t",
    ),
    "frequencies": (
        "a = Mul(x, f) u = Sin(a) v = Cos(a) y = Concat<axis = 1>(u, v)",
        (4, 6),
        {"f": 10000.0 ** (-np.arange(6) / 6)},
        "",
    ),
    "scaled frequencies": (
        "a = Mul(x, f) u = Sin(a) v = Cos(a) y = Concat<axis = 1>(u, v)",
        (4, 6),
        {"f": np.array([1, 0.3, 0.1, 0.004, 0.001, 0.0001])},
        "",
    ),
    "a layer of sines": (
        "h = MatMul(x, w) a = Add(h, b) y = Sin(a)",
        (4, 6),
        {"w": noise(6, 5), "b": noise(5)},
        "w b",
    ),
    "not only frequencies": (
        "a = Mul(x, f) u = Sin(a) y = Add(u, a)",
        (4, 6),
        {"f": noise(6)},
        "f",
    ),
    "folded tokens": ("y = Concat<axis = 1>(t, x)", (4, 5, 6), {"t": noise(1, 1, 6)[[0] * 4]}, ""),
    "gates in another order": (
        GATES,
        (5, 3, 4),
        {"w": noise(8, 4), "r": noise(8, 2), "b_in": noise(8), "b_state": noise(8)},
        "w r b_in b_state",
    ),
    "norm of groups": (
        "g = Reshape(x, by2) n = InstanceNormalization(g, ones, none)"
        " h = Reshape(n, back) y = Mul(h, s)",
        (4, 6, 5),
        {
            **{"ones": np.ones(2), "none": np.zeros(2), "s": noise(6, 1)},
            **{"by2": np.array([4, 2, -1]), "back": np.array([4, 6, 5])},
        },
        "s",
    ),
    "norm of channels": (
        "y = InstanceNormalization(x, ones, none)",
        (4, 2, 5),
        {"ones": np.ones(2), "none": np.zeros(2)},
        "ones none",
    ),
    "norm of what was reshaped": (
        "h = Reshape(x, by2) y = InstanceNormalization(h, s, b)",
        (4, 10),
        {"s": noise(2), "b": noise(2), "by2": np.array([4, 2, -1])},
        "s b",
    ),
    "experts by token": (
        "chosen = ArgMax<axis = 1>(x) w = GatherND(experts, chosen) y = MatMul(token, w)",
        (4, 6),
        {"experts": noise(6, 2, 2), "token": noise(1, 1, 2)},
        "experts token",
    ),
    "behind a sequence": (
        "q = SplitToSequence<axis = 1>(x, three) h = SequenceAt(q, first) y = MatMul(h, w)",
        (4, 6),
        {"w": noise(3, 2), "three": np.array(3), "first": np.array(0)},
        "w",
    ),
}
"""Nodes, the shape of x, what is stored, and the names of what is trained."""


@pytest.mark.parametrize("case", CASES)
def test_found(tmp_path: Path, case: str) -> None:
    text, shape, stored, expected = CASES[case]
    dims = ",".join(map(str, shape))
    header = '<ir_version: 8, opset_import: ["" : 20]>\n'
    proto = onnx.parser.parse_model(f"{header} g (float[{dims}] x) => (float y) {{ {text} }}")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    given = {"zero": np.array([0]), "one": np.array([1]), "eight": np.array([8])} | stored
    for name, value in given.items():
        value = value.astype(np.float32) if value.dtype == np.float64 else value
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    onnx.save(proto, tmp_path / "model.onnx")
    model = load(tmp_path / "model.onnx", LoadRequest(for_training=True))
    if expected:
        assert {t.name for t in find_trained(model).trained} == {*expected.split()}
    else:
        with pytest.raises(Exception, match="no weight is left to train"):
            find_trained(model)
