"""Default typical sizes keep to tables of positions that are read at computed indices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxpar.cli.command_line import main
from onnxpar.planner import sharder
from onnxpar.planner.options import Options

HEAD = """<ir_version: 8, opset_import: ["" : 17]>
m (int64[batch,seq] ids, int64[batch,seq] mask) => (float[batch,seq,16] y) {
  words = Gather(table, ids)
  s = Shape<start = 1>(ids)
  scalar = Squeeze(s)
  zero = Constant<value = int64 {0}>()
  one = Constant<value = int64 {1}>()
  ones = Constant<value = int64[1] {1}>()
"""
TAIL = " p = Gather(positions, at)  y = Add(words, p) }"
POSITIONS = {
    "range": " at = Range(zero, scalar, one) ",
    "slice of a row": " z = Constant<value = int64[1] {0}>() at = Slice(row, z, s, ones, ones) ",
    "of a mask": " c = CumSum(mask, one)  m = Mul(c, mask)  at = Sub(m, one) ",
    "of ids": """ pad = Equal(ids, one)  not = Not(pad)  n = Cast<to = 7>(not)
        c = CumSum(n, one)  m = Mul(c, n)  at = Sub(m, one) """,
}


def write(kind: str, rows: int, folder: Path) -> Path:
    """A model of that many positions."""
    proto = onnx.parser.parse_model(HEAD + POSITIONS[kind] + TAIL)
    tables = {"table": np.ones((99, 16), np.float32), "positions": np.ones((rows, 16), np.float32)}
    if kind == "slice of a row":
        tables["row"] = np.arange(500)[None]
    for name, value in tables.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


def runs(path: Path, length: int) -> bool:
    """Whether onnxruntime takes that many tokens, none of which is masked."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    session = ort.InferenceSession(path, settings)
    ids, mask = np.zeros((1, length), np.int64), np.ones((1, length), np.int64)
    feeds = {"ids": ids, "mask": mask}
    try:
        session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})
    except Exception:
        return False
    return True


@pytest.mark.matrix
@pytest.mark.parametrize("kind", POSITIONS)
def test_a_length_is_within_the_table(kind: str, tmp_path: Path) -> None:
    for rows, length in ((40, 32), (128, 128), (1024, 128)):
        path = write(kind, rows, tmp_path)
        assert runs(path, length) and not runs(path, rows + 1)
        made, _ = sharder.plan(path, Options(devices=2))
        ((sizes, _),) = made.typical
        assert dict(sizes) == {"batch": 1, "seq": length}


def test_a_length_that_is_too_large(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("range", 40, tmp_path)
    assert main(["plan", str(path), "--devices", "2", "--typical", "seq=41"]) == 2
    assert "--typical seq=41: the model does not run at these sizes" in capsys.readouterr().err
    assert main(["plan", str(path), "--devices", "2", "--typical", "seq=40"]) == 0
