"""The training scripts of examples/, as a person runs them: losses as of one unsplit model."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from training.steps import run_unsplit

from onnxpar.training import grad

EXAMPLES = Path(__file__).parents[2] / "examples"
WHOLE = """<ir_version: 8, opset_import: ["" : 17]>
network (float[32,64] x, float[64,128] w1, float[128,10] w2) => (float[32,10] logits)
{ h = MatMul (x, w1)  r = Relu (h)  logits = MatMul (r, w2) }"""


def unsplit(script: str, model: Path) -> None:
    """Saves the model that a script trains, as one program."""
    runpy.run_path(str(EXAMPLES / script))["build"](model)
    if script == "manual_parallel.py":
        weights = onnx.load(model).graph.initializer
        whole = onnx.parser.parse_model(WHOLE)
        whole.graph.initializer.extend(weights)
        del whole.graph.input[1:]
        onnx.save(whole, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "loss", "target", "rate"),
    [
        ("manual_parallel.py", "softmax-cross-entropy", "labels", 0.01),
        ("matmul_relu.py", "mse", "target", 0.2),
    ],
)
def test_losses(script: str, loss: str, target: str, rate: float, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / script)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    lines = re.findall(r"^epoch: (\d) step: (\d+), loss is (\S+)$", ran.stdout, re.MULTILINE)
    assert [(int(e), int(s)) for e, s, _ in lines] == [
        (e, s + 1) for e in (1, 2) for s in range(20)
    ]
    unsplit(script, tmp_path / "model.onnx")
    step = tmp_path / "step.onnx"
    grad(tmp_path / "model.onnx", step, loss=loss, optimizer="momentum")
    names: dict[str, Any] = runpy.run_path(str(EXAMPLES / script))
    x, y = (np.split(array, 20) for array in names["data"]())
    feeds = [{"x": a, target: b} for _ in (1, 2) for a, b in zip(x, y, strict=True)]
    told, _ = run_unsplit(step, feeds, [rate] * 40)
    np.testing.assert_allclose([float(v) for *_, v in lines], [t["loss"] for t in told], rtol=6e-3)
