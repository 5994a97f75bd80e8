"""A BatchNormalization that trains: its statistics in each run, wherever its results are needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxpar
from onnxpar.runtime.session.threads import ThreadSession

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
m (float[N,4,3,3] x) => (float[N,4,3,3] y, float[4] m2, float[4] v2)
<float[4] s = {1, 2, 3, 4}, float[4] b = {0, 1, 2, 3}, float[4] m = {10, 11, 12, 13},
 float[4] v = {1, 2, 3, 4}>
{ y, m2, v2 = BatchNormalization <training_mode = 1> (x, s, b, m, v) }"""
BY_CHANNEL = [None, "x", None, None]


@pytest.mark.parametrize(
    "tensors",
    [
        {"y": BY_CHANNEL, "v2": [None]},
        {"y": BY_CHANNEL, "m2": [None]},
        {"y": BY_CHANNEL, "v2": ["y"], "m2": ["y"]},
        {"y": BY_CHANNEL},
        {"x": ["x", None, None, None]},
    ],
    ids=str,
)
def test_statistics_are_those_of_each_run(tensors: dict[str, list[object]], tmp_path: Path) -> None:
    """Also in the second one: onnxruntime's kernel may write them over the stored ones."""
    path, par = tmp_path / "m.onnx", tmp_path / "m.par"
    onnx.save(onnx.parser.parse_model(MODEL), path)
    strategy = {"mesh": {"x": 2, "y": 2}, "tensors": tensors}
    onnxpar.shard(path, par, strategy=strategy, for_any_host=True)
    random, each = np.random.default_rng(0), np.arange(4).reshape(4, 1, 1)
    with ThreadSession(par, timeout=60) as session:
        for n in (2, 5):
            x = random.standard_normal((n, 4, 3, 3), np.float32)
            y, mean, variance = session.run(None, {"x": x})
            own, spread = x.mean((0, 2, 3)), x.var((0, 2, 3))
            wanted = (x - own[:, None, None]) / np.sqrt(spread[:, None, None] + 1e-5)
            np.testing.assert_allclose(y, wanted * (each + 1) + each, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(mean, 0.9 * (10 + np.arange(4)) + 0.1 * own, rtol=1e-5)
            np.testing.assert_allclose(variance, 0.9 * (1 + np.arange(4)) + 0.1 * spread, rtol=1e-5)
