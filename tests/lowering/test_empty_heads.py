"""Ranks without heads of an Attention load: its result has a width that the next op sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import check_agrees, options
from onnx import numpy_helper


@pytest.mark.parametrize(("heads", "shared", "ranks"), [(2, 2, 3), (3, 3, 4), (4, 2, 3)])
def test_more_ranks_than_key_heads(heads: int, shared: int, ranks: int, tmp_path: Path) -> None:
    wide, narrow = 2 * heads, 2 * shared
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 23]>
        m (float[3,5,{wide}] q, float[3,5,{narrow}] k, float[3,5,{narrow}] v) => (float[3,5,6] y)
        {{ o = Attention<q_num_heads = {heads}, kv_num_heads = {shared}>(q, k, v)
        y = MatMul(o, w) }}"""
    )
    w = np.random.default_rng(0).standard_normal((wide, 6)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    onnx.save(model, tmp_path / "model.onnx")
    split = {"tensors": {"o": [None, None, "tp"]}}
    check_agrees(tmp_path / "model.onnx", tmp_path, options(f"tp={ranks}", strategy=split))
