"""Steps of models whose sizes are known, though ONNX's inference leaves them open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from training.steps import Array, quiet

from onnxpar.training import grad

HEAD = '<ir_version: 10, opset_import: ["" : 18]>\n'
SUM = "s = Sin(b)  y = ReduceSum<keepdims = 0>(s)"
CONSTANTS = """bool[4] mask = {1, 0, 1, 1}, int64 place = {-2}, int64[2] sizes = {2, 1},
    int64 two = {2}, int64 first = {0}, int64 last = {-1}, int64[1] axis = {1}"""
CASES = {
    "rows by a constant mask": "b = Compress<axis = -1>(w, mask)",
    "elements by a constant mask": "b = Compress(w, mask)",
    "a joined list": "l = SequenceConstruct(x, w, w)  b = ConcatFromSequence<axis = 1>(l)",
    "a stacked list": """l = SequenceConstruct(x, w)
        b = ConcatFromSequence<axis = -1, new_axis = 1>(l)""",
    "uneven parts": """l = SplitToSequence<axis = 1>(w, sizes)  p = SequenceAt(l, first)
        q = SequenceAt(l, last)  d = ReduceProd<keepdims = 1>(p, axis)  b = Mul(d, q)""",
    "a smaller last part": """l = SplitToSequence<axis = -1>(w, two)  p = SequenceAt(l, first)
        q = SequenceAt(l, last)  c = Mul(p, p)  b = Mul(c, q)""",
    "an element of a list": """l = SequenceConstruct(w, x)  a = SequenceAt(l, place)
        b = Mul(a, a)""",
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str, tmp_path: Path) -> None:
    """They are those by central differences."""
    text = f"""m (double[2,3] x, double[2,3] w) => (double y) <{CONSTANTS}>
        {{ {CASES[case]}  {SUM} }}"""
    draw = np.random.default_rng(3)
    x, w = draw.standard_normal((2, 2, 3))
    model = onnx.parser.parse_model(HEAD + text)
    plain = ort.InferenceSession(model.SerializeToString(), quiet())

    def y(w: Array) -> float:
        (found,) = plain.run(None, {"x": x, "w": w})
        return float(found)

    del model.graph.input[1]
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    grad(tmp_path / "m.onnx", tmp_path / "step.onnx", loss="y", optimizer=None, params=["w"])
    step = ort.InferenceSession(str(tmp_path / "step.onnx"), quiet())
    feeds = {"x": x} if "x" in {port.name for port in step.get_inputs()} else {}
    (found,) = step.run(["w.grad"], feeds)
    for at in np.ndindex(w.shape):
        off = np.zeros_like(w)
        off[at] = 1e-6
        np.testing.assert_allclose(found[at], (y(w + off) - y(w - off)) / 2e-6, atol=1e-7)
