"""A Dropout whose result the graph returns drops on ranks, too, and what its other readers read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxpar
from onnxpar.runtime.session.threads import ThreadSession

MODEL = """<ir_version: 10, opset_import: ["" : 22]>
m (float[N,64] x) => (float[N,64] y, float[N,1] z{more})
<float r = {{0.3}}, int64[1] a = {{1}}, bool t = {{{trains}}}>
{{ y{mask} = Dropout{seed} (x, r, t)  z = ReduceSum (y, a) }}"""
WAYS = [{"x": ["x", None]}, {"x": [None, "x"]}, {"y": ["x", None]}, {}]


@pytest.mark.parametrize("split", WAYS, ids=str)
@pytest.mark.parametrize("seed", ["", " <seed = 7>"])
@pytest.mark.parametrize("mask", [False, True])
def test_what_is_returned_is_dropped(
    mask: bool, seed: str, split: dict[str, list[object]], tmp_path: Path
) -> None:
    texts = (", m", ", bool[N,64] m") if mask else ("", "")
    text = MODEL.format(mask=texts[0], more=texts[1], seed=seed, trains=1)
    path, par = tmp_path / "m.onnx", tmp_path / "m.par"
    onnx.save(onnx.parser.parse_model(text), path)
    how = {"strategy": {"mesh": {"x": 2}, "tensors": split}} if split else {"devices": 2}
    onnxpar.shard(path, par, for_any_host=True, **how)
    x = np.ones((60, 64), np.float32)
    with ThreadSession(par, timeout=60) as session:
        y, z, *shown = session.run(None, {"x": x})
    assert 0.2 < (y == 0).mean() < 0.4
    np.testing.assert_allclose(y[y != 0], 1 / 0.7, rtol=1e-6)
    np.testing.assert_allclose(z, y.sum(1, keepdims=True), rtol=1e-5)
    if mask:
        np.testing.assert_array_equal(shown[0], y != 0)


def test_a_dropout_that_does_not_train_changes_nothing(tmp_path: Path) -> None:
    text = MODEL.format(mask="", more="", seed="", trains=0)
    path, par = tmp_path / "m.onnx", tmp_path / "m.par"
    onnx.save(onnx.parser.parse_model(text), path)
    split = {"mesh": {"x": 2}, "tensors": {"x": ["x", None]}}
    plan = onnxpar.shard(path, par, strategy=split, for_any_host=True)
    assert all(c.kind != "Broadcast" for c in plan.collectives)
    assert "Where" not in {node.op_type for node in onnx.load(par / "rank_0000.onnx").graph.node}
    x = np.ones((6, 64), np.float32)
    with ThreadSession(par, timeout=60) as session:
        assert (session.run(["y"], {"x": x})[0] == 1).all()
