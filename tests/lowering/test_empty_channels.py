"""Quantized convolutions on ranks that have no output channel, and unsigned products on ranks that
have no part of the sum: onnxruntime's kernels do not accept these."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import onnxpar
from onnxpar.runtime.session.threads import ThreadSession


def agree(
    folder: Path, text: str, weights: dict[str, np.ndarray], x: np.ndarray, split: tuple[str, int]
) -> None:
    """Compares 3 and 5 ranks with the unsplit model, bit for bit; `split` is a tensor and its
    dimension."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    onnx.save(proto, folder / "m.onnx")
    unsplit = ort.InferenceSession(folder / "m.onnx", providers=["CPUExecutionProvider"])
    (wanted,) = unsplit.run(None, {"x": x})
    name, dim = split
    for ranks in (3, 5):
        rank = weights[name].ndim if name in weights else wanted.ndim
        layout = ["tp" if i == dim else None for i in range(rank)]
        strategy = {"mesh": {"tp": ranks}, "tensors": {name: layout}}
        onnxpar.shard(folder / "m.onnx", folder / f"{ranks}.par", strategy=strategy)
        with ThreadSession(folder / f"{ranks}.par") as session:
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], wanted)


@pytest.mark.parametrize("split", [("w", 0), ("y", 1)])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_quantized_convolution(
    split: tuple[str, int], group: int, bias: bool, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    weights = {
        "w": random.integers(-9, 9, (2, 4 // group, 3)).astype(np.int8),
        "s": np.array([0.01, 0.02], np.float32),
        "z": np.zeros(2, np.int8),
        "b": random.integers(-99, 99, 2).astype(np.int32),
        "sx": np.float32(0.05),
        "zx": np.uint8(7),
        "sy": np.float32(0.5),
        "zy": np.uint8(100),
    }
    more = ", b" if bias else ""
    text = f"""m (uint8[1,4,9] x) => (uint8[1,2,7] y)
        {{ y = QLinearConv<group = {group}>(x, sx, zx, w, s, z, sy, zy{more}) }}"""
    x = random.integers(0, 255, (1, 4, 9)).astype(np.uint8)
    agree(tmp_path, text, weights, x, split)


@pytest.mark.parametrize("split", [("w", 0), ("y", 1)])
@pytest.mark.parametrize("scale", ["per channel", "one"])
def test_a_convolution_that_onnxruntime_quantizes(
    split: tuple[str, int], scale: str, tmp_path: Path
) -> None:
    random = np.random.default_rng(1)
    many = scale == "per channel"
    weights = {
        "w": random.integers(-9, 9, (2, 4, 3)).astype(np.int8),
        "s": np.array([0.01, 0.02], np.float32) if many else np.float32(0.01),
        "z": np.zeros(2, np.int8) if many else np.int8(0),
        "sx": np.float32(0.05),
        "zx": np.uint8(120),
        "sy": np.float32(0.1),
        "zy": np.uint8(128),
    }
    axis = "<axis = 0>" if many else ""
    text = f"""m (float[1,4,9] x) => (float[1,2,7] y) {{
        q = QuantizeLinear(x, sx, zx)  d = DequantizeLinear(q, sx, zx)
        e = DequantizeLinear{axis}(w, s, z)  c = Conv(d, e)
        r = QuantizeLinear(c, sy, zy)  y = DequantizeLinear(r, sy, zy) }}"""
    agree(tmp_path, text, weights, random.standard_normal((1, 4, 9), np.float32), split)


@pytest.mark.parametrize("dtype", ["uint32", "uint64", "int32", "int64"])
def test_unsigned_products_over_nothing(dtype: str, tmp_path: Path) -> None:
    """Large values: sums wrap as in the unsplit model."""
    most = np.iinfo(dtype).max
    x = np.array([[most, 3], [5, most - 7], [0, 1]], dtype)
    text = f"m ({dtype}[3,2] x) => ({dtype}[3,2] y) {{ y = MatMul(x, v) }}"
    agree(tmp_path, text, {"v": np.array([[2, 9], [most, 1]], dtype)}, x, ("v", 0))
