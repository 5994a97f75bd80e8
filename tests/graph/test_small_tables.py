"""Slices of small stored tables that end at an open size, along which ranks split what reads them:
each part of such a table is another one at each size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxpar
from onnxpar.runtime.session.threads import ThreadSession

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
m (float[batch,seq,4] x) => (float[batch,seq,4] y) {
  s = Shape<start = 1, end = 2>(x)
  zero = Constant<value = int64[1] {0}>()
  one = Constant<value = int64[1] {1}>()
  at = Slice(row, zero, s, one, one)
  p = Gather(positions, at)
  bias = Slice(table, zero, s, one, one)
  a = Add(x, p)
  y = Add(a, bias) }"""


def write(rows: int, name: str, folder: Path) -> Path:
    """A model of so many positions, whose indices and biases are stored under this name."""
    proto = onnx.parser.parse_model(MODEL)
    draw = np.random.default_rng(rows)
    tables = {
        "row": draw.permutation(rows)[None],
        "positions": draw.standard_normal((rows, 4)).astype(np.float32),
        "table": draw.standard_normal((1, rows, 4)).astype(np.float32),
    }
    for old, value in tables.items():
        new = name.replace("NAME", old)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, new))
        for node in proto.graph.node:
            node.input[:] = [new if each == old else each for each in node.input]
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize(("rows", "ranks"), [(9, 2), (16, 2), (16, 3), (16, 8), (300, 3)])
@pytest.mark.parametrize("name", ["NAME", "onnx::NAME_4"])
def test_any_length(rows: int, name: str, ranks: int, tmp_path: Path) -> None:
    """By a session of onnxruntime, up to the length of the tables."""
    path = write(rows, name, tmp_path)
    strategy = {"tensors": {"y": [None, "sp", None]}}
    plan = onnxpar.shard(path, tmp_path / "m.par", mesh=f"sp={ranks}", strategy=strategy)
    assert plan.to_json()["outputs"][0]["layout_text"] == "[-, sp, -]"
    unsplit = ort.InferenceSession(path)
    with ThreadSession(tmp_path / "m.par") as session:
        for length in (1, 2, 3, 5, rows // 2, rows - 1, rows):
            x = np.random.default_rng(length).standard_normal((2, length, 4)).astype(np.float32)
            np.testing.assert_array_equal(
                session.run(None, {"x": x})[0], unsplit.run(None, {"x": x})[0], str(length)
            )


@pytest.mark.parametrize("names", [("start0", "part0"), (":part0", "filled_start0")])
def test_dims_named_as_the_compiler_names_shards(names: tuple[str, str], tmp_path: Path) -> None:
    """Names of a model's dims are not those of starts and sizes of shards."""
    path = write(16, "NAME", tmp_path)
    proto = onnx.load(path)
    for value in (*proto.graph.input, *proto.graph.output):
        for dim, name in zip(value.type.tensor_type.shape.dim, names, strict=False):
            dim.dim_param = name
    onnx.save(proto, path)
    strategy = {"tensors": {"y": ["dp", "sp", None]}}
    onnxpar.shard(path, tmp_path / "m.par", mesh="dp=2,sp=3", strategy=strategy)
    unsplit = ort.InferenceSession(path)
    with ThreadSession(tmp_path / "m.par") as session:
        for batch, length in ((2, 16), (1, 5), (7, 2), (5, 1)):
            x = np.random.default_rng(length).standard_normal((batch, length, 4)).astype(np.float32)
            np.testing.assert_array_equal(
                session.run(None, {"x": x})[0], unsplit.run(None, {"x": x})[0]
            )
