"""Steps of models with a Loop: what follows it has the sizes that it carries."""

from __future__ import annotations

from pathlib import Path

from small_models import write_text

import onnxpar
from onnxpar.training import grad

TEXT = """<ir_version: 10, opset_import: ["" : 18]>
loop (float[3,5] h) => (float[3,4] y) <int64 n = {3}, bool go = {1}> {
    g = Loop<body = b (int64 i, bool c, float[3,5] s) => (bool d, float[3,5] t)
        { d = Identity(c)  q = MatMul(s, w)  t = Tanh(q) }>(n, go, h)
    y = MatMul(g, w2) }"""


def test_a_weight_after_a_loop(tmp_path: Path) -> None:
    """Ranks sum both gradients at once, of sizes that they know."""
    text = TEXT.replace("(float[3,5] h)", "(float[3,5] h, float[5,5] w, float[5,4] w2)")
    model = write_text(text, tmp_path / "m.onnx")
    step = tmp_path / "step.onnx"
    grad(model, step, loss="mse", optimizer="sgd", params=["w*"])
    found = onnxpar.check(step, devices=2, preset="data-parallel")
    assert found.ok
    assert {row.name for row in found.report.rows} >= {"loss", "w.next", "w2.next"}
