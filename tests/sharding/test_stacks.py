"""A dimension whose elements are tensors of their own, as torch.stack makes it, can be split by the
nodes behind and before it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit

from onnxpar.planner import sharder

TEXT = """<ir_version: 8, opset_import: ["" : 18]>
stacks (float[K,4,6] x, float[4,6] a, float[4,6] b) => (float[5,4,4] y, float[4,4] first)
    <float[6,4] v, int64[1] zero = {0}> {
  t = Transpose<perm = [1, 0]>(v)
  p = Unsqueeze(a, zero)  q = Unsqueeze(b, zero)  r = Unsqueeze(t, zero)
  s = Sub(p, q)  m = Mul(p, q)
  stack = Concat<axis = 0>(p, q, s, m, r)
  c = Mul(x, stack)
  h = MatMul(c, v)
  y = Tanh(h)
  f0, f1, f2, f3, f4 = Split<axis = 0, num_outputs = 5>(y)
  g = Sub(f0, f4)
  first = Squeeze(g, zero)
}"""


@pytest.mark.parametrize("layout", ["tp=2", "tp=3", "tp=5", "tp=7"])
def test_nodes_between_a_stack_and_its_parts_are_split_along_it(
    layout: str, tmp_path: Path
) -> None:
    model = onnx.parser.parse_model(TEXT.replace("K", "5"))
    random = np.random.default_rng(3)
    weight = random.standard_normal((6, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "v"))
    onnx.save(model, tmp_path / "m.onnx")
    strategy = {"tensors": {name: ["tp", None, None] for name in ("c", "h", "y")}}
    plan = sharder.shard(
        tmp_path / "m.onnx", tmp_path / "m.par", options(layout, strategy=strategy)
    )
    shapes = {"x": (5, 4, 6), "a": (4, 6), "b": (4, 6)}
    feeds = {k: random.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    assert [c.kind for c in plan.collectives] == ["AllGather"]
    outputs = run_ranks(tmp_path / "m.par", feeds)
    check_outputs(outputs, run_unsplit(tmp_path / "m.onnx", feeds), ["y", "first"])
