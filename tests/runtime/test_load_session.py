"""Models that onnxruntime's own rewrites make unloadable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from agreement import TIMEOUT, options
from small_models import write_text

from onnxpar.planner import sharder
from onnxpar.report.unsplit import run_unsplit
from onnxpar.runtime.session.threads import ThreadSession


@pytest.mark.parametrize("channels", [1, 2])
def test_int8_past_a_transpose(channels: int, tmp_path: Path) -> None:
    """With a channel for each rank, a scale per channel is one number, which onnxruntime moves."""
    scale, point = ", ".join(["0.5"] * channels), ", ".join(["3"] * channels)
    model = write_text(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[3,{channels},2,2] x) => (float[2,2,{channels},3] y)
        <float[{channels}] s = {{{scale}}}, int8[{channels}] z = {{{point}}}>
        {{ q = QuantizeLinear<axis = 1>(x, s, z)  d = DequantizeLinear<axis = 1>(q, s, z)
          y = Transpose<perm = [3, 2, 1, 0]>(d) }}""",
        tmp_path / "m.onnx",
    )
    x = np.random.default_rng(0).integers(-9, 9, (3, channels, 2, 2)).astype(np.float32) / 2
    np.testing.assert_array_equal(run_unsplit(model, {"x": x})["y"], x.transpose(3, 2, 1, 0))
    how = options("tp=2", strategy={"tensors": {"x": [None, "tp", None, None]}})
    sharder.shard(model, tmp_path / "m.par", how)
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x.transpose(3, 2, 1, 0))
