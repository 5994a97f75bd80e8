"""Products that onnxruntime fuses with DequantizeLinear, on ranks that have no part of them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import onnxpar
from onnxpar.runtime.session.threads import ThreadSession

RUNS = 20
"""Uninitialized memory differs from run to run, but not always."""


def agree(folder: Path, body: str, sizes: str, weights: dict[str, np.ndarray], split: str) -> None:
    """Compares 3 ranks, of which one has no part of a dimension of size 2, with the unsplit model.
    `split` is a tensor and its dimension."""
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        net (float[{sizes}] x) => (float[2,2] y) {{ {body} }}""")
    proto.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    onnx.save(proto, folder / "m.onnx")
    x = np.random.default_rng(1).standard_normal(
        [int(size) for size in sizes.split(",")], np.float32
    )
    unsplit = ort.InferenceSession(folder / "m.onnx", providers=["CPUExecutionProvider"])
    (wanted,) = unsplit.run(None, {"x": x})
    name, dim = split.split(".")
    layout = ["tp" if i == int(dim) else None for i in range(2)]
    onnxpar.shard(
        folder / "m.onnx", folder / "m.par", mesh="tp=3", strategy={"tensors": {name: layout}}
    )
    with ThreadSession(folder / "m.par") as session:
        for _ in range(RUNS):
            (y,) = session.run(None, {"x": x})
            np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("split", ["x.1", "q.1", "w.0", "w.1", "y.0"])
@pytest.mark.parametrize("weight", [np.uint8, np.int8])
@pytest.mark.parametrize("activation", [np.uint8, np.int8])
def test_quantized_activations(tmp_path: Path, activation: type, weight: type, split: str) -> None:
    random = np.random.default_rng(2)
    body = """q = QuantizeLinear(x, s, a)  d = DequantizeLinear(q, s, a)
        e = DequantizeLinear(w, t, b)  y = MatMul(d, e)"""
    weights = {"w": random.integers(0, 100, (2, 2)).astype(weight), "a": np.array(7, activation)}
    weights |= {"b": np.array(3, weight), "s": np.float32(0.05), "t": np.float32(0.02)}
    agree(tmp_path, body, "2,2", weights, split)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("split", ["w.1", "y.1", "y.0"])
@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "uint4"])
@pytest.mark.parametrize("block", [0, 16, 32])
@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_stored_weights(tmp_path: Path, op: str, block: int, name: str, split: str) -> None:
    """They stay stored, so that onnxruntime fuses them as in the unsplit model, and rounds so."""
    random = np.random.default_rng(3)
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    rows = 2 * (block or 1)
    attrs = f"axis = 0, block_size = {block}" if block else "axis = 1"
    scale = np.abs(random.standard_normal((2, 2) if block else 2, np.float32)) + np.float32(0.1)
    weights = {"w": random.integers(0, 7, (rows, 2)).astype(dtype), "s": scale}
    weights["z"] = random.integers(0, 7, scale.shape).astype(dtype)
    body = f"e = DequantizeLinear<{attrs}>(w, s, z)  y = {op}(x, e)"
    agree(tmp_path, body, f"2,{rows}", weights, split)


def test_a_quantized_tensor_is_gathered_for_no_reader(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 23]>
        net (float[N,M] x) => (float[N,M] y)
        <float e = {0.1}, int8 z = {3}> {
          q = QuantizeLinear (x, e, z)
          y = DequantizeLinear (q, e, z) }""")
    onnx.save(proto, tmp_path / "m.onnx")
    tensors = {"x": ["y", "x"], "q": ["y", None], "y": ["y", "x"]}
    strategy = {"mesh": {"x": 2, "y": 2}, "tensors": tensors}
    onnxpar.shard(tmp_path / "m.onnx", tmp_path / "m.par", strategy=strategy)
    x = np.random.default_rng(1).standard_normal((5, 7), np.float32)
    wanted = ort.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x})[0]
    with ThreadSession(tmp_path / "m.par") as session:
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], wanted)
