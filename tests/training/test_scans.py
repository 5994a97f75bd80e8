"""Gradients of CumSum and CumProd whose axis is split: each rank scans its shard, and goes on from
the totals of the ranks before it, or after it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxpar

SPLIT = {"shard": {"scan": [[None, "sp"], None]}}


def model(op: str, attributes: dict[str, int]) -> onnx.ModelProto:
    weight = np.linspace(0.5, 1.5, 35, dtype=np.float32).reshape(5, 7)
    stored = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array(1), "axis")]
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["h"]),
        helper.make_node(op, ["h", "axis"], ["c"], name="scan", **attributes),
        helper.make_node("Mul", ["c", "w"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [5, 7]) for n in "xy"]
    graph = helper.make_graph(nodes, "scans", ports[:1], ports[1:], stored)
    opset = helper.make_opsetid("", 26 if op == "CumProd" else 20)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("attributes", [{}, {"reverse": 1}, {"exclusive": 1, "reverse": 1}])
@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
def test_a_step_over_a_split_scan(
    op: str, attributes: dict[str, int], ranks: int, tmp_path: Path
) -> None:
    onnx.save(model(op, attributes), tmp_path / "scan.onnx")
    step = tmp_path / "step.onnx"
    onnxpar.training.grad(tmp_path / "scan.onnx", step, loss="mse", optimizer="sgd", params=["w"])
    found = onnxpar.check(step, mesh=f"sp={ranks}", strategy=SPLIT)
    assert found.ok
    assert {row.name for row in found.report.rows} >= {"loss", "w.next"}
    inner = [c.kind for c in found.plan.collectives if c.tensor == "in scan"]
    assert inner == ["AllGather"]  # of one total per row and rank
