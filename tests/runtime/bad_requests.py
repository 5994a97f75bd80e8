"""A small decoder, and strategies by which a request can be bad on one rank alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

ROWS, BATCH = 64, 4
DECODER = """<ir_version: 8, opset_import: ["" : 17]>
decode (int64[4,1] ids, float[4,1,8] s) => (float[4,1,8] next, float[4,1,64] y)
{ [embed] e = Gather(table, ids)
  [keep] next = Add(s, e)
  [up] h = MatMul(next, up_w)
  [bend] r = Relu(h)
  [down] d = MatMul(r, down_w)
  [head] y = MatMul(d, head_w) }"""
STRATEGIES = {
    "vocabulary": "mesh: {tp: 2}\nshard: {embed: [[tp, null], [null, null]], "
    "up: [[null, null, null], [null, tp]], down: [[null, null, tp], [tp, null]]}",
    "batch": "mesh: {dp: 2}\nshard: {embed: [[null, null], [dp, null]]}",
}


def decoder(folder: Path) -> Path:
    """A table of 64 rows, a state that adds up what is looked up, and a split product."""
    proto = onnx.parser.parse_model(DECODER)
    random = np.random.default_rng(0)
    shapes = {"table": (ROWS, 8), "up_w": (8, 16), "down_w": (16, 8), "head_w": (8, ROWS)}
    for name, shape in shapes.items():
        weight = random.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    path = folder / "decode.onnx"
    onnx.save(proto, path)
    return path
