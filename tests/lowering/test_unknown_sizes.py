"""Reshards of tensors with several sizes that only data decide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from agreement import TIMEOUT, check_outputs, options, run_unsplit
from onnx import numpy_helper
from small_models import HEAD, write_text

from onnxpar.planner import sharder
from onnxpar.runtime.session.threads import ThreadSession

GROUPED = (
    HEAD
    + """m (float[B,1,N] x) => (float[r,l,8] y)
    { a = Conv<strides = [5]>(x, w1)  s = Shape(a)  h = Cast<to = 10>(s)  i = Cast<to = 7>(h)
      f = Constant <value_ints = [0, -1]>()  e = Reshape(a, f)  g = Tanh(e)  r = Reshape(g, i)
      b = Conv<strides = [2]>(r, w8)  c = Conv<strides = [2]>(b, w8)
      p = Conv<pads = [4, 4], group = 2>(c, w4)
      o = Constant <value_ints = [0]>()  m = Constant <value_ints = [-1]>()
      two = Constant <value_ints = [2]>()  t = Slice(p, o, m, two)
      q = Add(c, t)  y = Transpose<perm = [0, 2, 1]>(q) }"""
)


def test_channels_of_groups_are_gathered(tmp_path: Path) -> None:
    """Parts of a merged dimension move between two dimensions of which sizes are unknown, because
    the model rounds them to half precision."""
    path = write_text(GROUPED, tmp_path / "m.onnx")
    model = onnx.load(path)
    source = np.random.default_rng(0)
    for channels, width in {1: 3, 4: 8, 8: 3}.items():
        kernel = source.standard_normal((8, channels, width)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(kernel, f"w{channels}"))
    onnx.save(model, path)
    plan = sharder.shard(path, tmp_path / "m.par", options("tensor-parallel 2"))
    assert "[-, 2*tp, -]" in [c.before for c in plan.collectives]
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for batch, length in (1, 80), (2, 133):
            feeds = {"x": source.standard_normal((batch, 1, length)).astype(np.float32)}
            check_outputs(session.run(None, feeds), run_unsplit(path, feeds), ["y"])
