"""Ranks of a split model leave sums and norms apart, because onnxruntime's fused op is slower;
ranks that compute the whole model fuse what onnxruntime fuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from onnxpar import InferenceSession, shard

BATCH, SEQ, WIDTH = 2, 3, 8


def write(path: Path) -> Path:
    """x + relu(x @ up) @ down, normalised."""
    draw = np.random.default_rng(0)
    matrices = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    shapes = {**matrices, "scale": (WIDTH,), "bias": (WIDTH,)}
    weights = [
        numpy_helper.from_array(draw.standard_normal(shape, np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["wide"]),
        helper.make_node("Relu", ["wide"], ["active"]),
        helper.make_node("MatMul", ["active", "down"], ["h"]),
        helper.make_node("Add", ["x", "h"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "scale", "bias"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [BATCH, SEQ, WIDTH]) for n in "xy"]
    graph = helper.make_graph(nodes, "norm", ports[:1], ports[1:], weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def ran(profile: str) -> set[str]:
    """The ops in onnxruntime's profile."""
    events = json.loads(Path(profile).read_text())
    return {event["args"]["op_name"] for event in events if event.get("cat") == "Node"}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("ranks", "preset", "is_fused"),
    [(1, None, True), (2, "data-parallel", False), (2, "tensor-parallel", False)],
)
def test_sums_before_norms(ranks: int, preset: str | None, is_fused: bool, tmp_path: Path) -> None:
    model = write(tmp_path / "model.onnx")
    x = np.random.default_rng(1).standard_normal((BATCH, SEQ, WIDTH)).astype(np.float32)
    (wanted,) = ort.InferenceSession(model).run(None, {"x": x})
    shard(model, tmp_path / "model.par", devices=ranks, preset=preset)
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    with InferenceSession(tmp_path / "model.par", options) as session:
        (got,) = session.run(None, {"x": x})
        ops = ran(session.end_profiling())
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert ("SkipLayerNormalization" in ops) == is_fused
    assert ("LayerNormalization" in ops) != is_fused
