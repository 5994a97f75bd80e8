"""A Gather by a Range that crosses zero takes what ONNX says, over ranks and in `check`:
onnxruntime makes a Slice of it, which counts the negative end from the end of the dimension."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import TIMEOUT, options

from onnxpar.planner import sharder
from onnxpar.report.unsplit import run_unsplit
from onnxpar.runtime.session.threads import ThreadSession

RANGES = {
    "reversed": ("Range(last, minus, minus)", np.s_[::-1]),
    "every other": ("Range(last, minus, minus2)", np.s_[::-2]),
    "all but one": ("Range(before, minus, minus)", np.s_[-2::-1]),
    "upwards": ("Range(zero, size, one)", np.s_[:]),
}


@pytest.mark.parametrize("split", [None, [None, "tp", None]])
@pytest.mark.parametrize("name", RANGES)
def test_rows_by_a_range(name: str, split: list[str | None] | None, tmp_path: Path) -> None:
    made, wanted = RANGES[name]
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[B,N,2] x) => (float[B,K,2] y)
        <int64 minus = {{-1}}, int64 minus2 = {{-2}}, int64 zero = {{0}}, int64 one = {{1}},
        int64 two = {{2}}>
        {{ n = Shape<start = 1, end = 2>(x)  size = Squeeze(n)  last = Sub(size, one)
        before = Sub(size, two)  r = {made}  y = Gather<axis = 1>(x, r) }}"""
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    strategy = None if split is None else {"tensors": {"x": split}}
    sharder.shard(path, tmp_path / "m.par", options("tp=2", strategy=strategy))
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        for size in (2, 5):
            x = np.arange(4 * size, dtype=np.float32).reshape(2, size, 2)
            assert session.run(None, {"x": x})[0].tolist() == x[:, wanted].tolist()
            assert run_unsplit(path, {"x": x})["y"].tolist() == x[:, wanted].tolist()
