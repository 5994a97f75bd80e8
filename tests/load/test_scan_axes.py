"""Scans that read and stack along any axis, on ranks that have no part of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxpar
from onnxpar.runtime.session.threads import ThreadSession


def scan(axes: tuple[int, int], backwards: int) -> onnx.ModelProto:
    """h' = tanh(h + x), 5 steps over x along the first axis; all h', stacked along the second."""
    sizes = ["B,3"] * 2
    for i, axis in enumerate(axes):
        dims = ["B", "3"]
        dims.insert(axis % 3, "5")
        sizes[i] = ",".join(dims)
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        net (float[{sizes[0]}] x, float[B,3] h) => (float[B,3] last, float[{sizes[1]}] all) {{
            last, all = Scan<num_scan_inputs = 1, scan_input_axes = [{axes[0]}],
                scan_output_axes = [{axes[1]}], scan_output_directions = [{backwards}],
                body = step (float[B,3] a, float[B,3] b) => (float[B,3] c, float[B,3] d) {{
                    e = Add(a, b)  c = Tanh(e)  d = Relu(c) }}>(h, x) }}""")


@pytest.mark.matrix(4)
@pytest.mark.parametrize("batch", [None, 1, 3])
@pytest.mark.parametrize("split", [["tp", None], [None, "tp"]])
@pytest.mark.parametrize(
    ("axes", "backwards"), [((0, 1), 0), ((1, 1), 0), ((1, -1), 1), ((2, 2), 0), ((-2, 0), 1)]
)
def test_parts_without_elements(
    tmp_path: Path,
    axes: tuple[int, int],
    backwards: int,
    split: list[str | None],
    batch: int | None,
) -> None:
    path, random = tmp_path / "m.onnx", np.random.default_rng(3)
    onnx.save(scan(axes, backwards), path)
    unsplit = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    dims, strategy = {"B": batch} if batch else {}, {"tensors": {"h": split}}
    onnxpar.shard(path, tmp_path / "m.par", mesh="tp=4", strategy=strategy, dims=dims)
    with ThreadSession(tmp_path / "m.par") as session:
        for size in [batch] if batch else [1, 3, 6]:
            shape = [size, 3]
            shape.insert(axes[0] % 3, 5)
            feeds = {"x": random.standard_normal(shape, np.float32)}
            feeds["h"] = random.standard_normal((size, 3), np.float32)
            for given, wanted in zip(
                session.run(None, feeds), unsplit.run(None, feeds), strict=True
            ):
                np.testing.assert_array_equal(given, wanted)
