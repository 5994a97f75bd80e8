"""Results have the sizes that onnxruntime's kernels give them, also where ONNX's inference counts
otherwise: pools that round up, or have gaps, and images that are scaled."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from agreement import TIMEOUT, options, run_unsplit
from onnx import numpy_helper

from onnxpar.graph.infer_model import infer
from onnxpar.graph.shape_inference import Walk
from onnxpar.planner import sharder
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.training import grad

SIZES = (1, 2, 3, 4, 5, 7, 8, 9)
LAYOUTS = {"2": None, "tp=3": {"tensors": {"x": [None, None, "tp"]}}}


def parsed(text: str, opset: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')


def run_plainly(model: onnx.ModelProto) -> ort.InferenceSession:
    """A session that leaves the model as it is, and is silent."""
    how = ort.SessionOptions()
    how.log_severity_level = 4
    how.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), how)


def check_sizes(model: onnx.ModelProto) -> None:
    """An AssertionError if an inferred size is not that of a run, where the model runs. The model
    has one input `x` of shape [1, 1, N], and one node."""
    session = run_plainly(model)
    for size in SIZES:
        try:
            wanted = session.run(None, {"x": np.ones((1, 1, size), np.float32)})[0].shape
        except Exception:
            continue
        model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = size
        walk = Walk(model)
        walk.infer(model.graph.node[0])
        assert walk.shape("y") == wanted, size


@pytest.mark.matrix(4)
@pytest.mark.parametrize("opset", [18, 21, 22])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_numbers_of_windows(op: str, width: int, opset: int) -> None:
    gaps = (1, 2) if op == "MaxPool" or opset > 18 else (1,)
    for stride, gap, up in product((1, 2, 5), gaps, (0, 1)):
        common = f"kernel_shape = [{width}], strides = [{stride}]"
        common += f", dilations = [{gap}]" if gap > 1 else ""
        common += ", ceil_mode = 1" if up else ""
        last = width - 1
        pads = (f"pads = [{a}, {b}]" for a, b in {(0, 0), (0, last), (last, last)})
        for padding in [*pads, 'auto_pad = "SAME_LOWER"']:
            text = f"m (float[1,1,N] x) => (float[1,1,M] y) {{ y = {op}<{common}, {padding}>(x) }}"
            check_sizes(parsed(text, opset))


@pytest.mark.parametrize(
    ("opset", "scale"), [*product((10, 13, 19), (0.6, 0.7, 0.9, 1.3, 1.4, 1.8)), (9, 1.4), (9, 1.8)]
)
def test_scaled_sizes(opset: int, scale: float) -> None:
    """10 x 1.4 is 14 in float32, and less in float64."""
    op = "Upsample(x, s)" if opset < 10 else "Resize(x, s)" if opset < 11 else "Resize(x, , s)"
    model = parsed(f"m (float[1,1,N] x) => (float[1,1,M] y) {{ y = {op} }}", opset)
    scales = np.array([1, 1, scale], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(scales, "s"))
    session = run_plainly(model)
    for size in (3, 5, 10, 15, 20, 29):
        given = parsed(f"m (float[1,1,{size}] x) => (float[a,b,c] y) {{ y = {op} }}", opset)
        given.graph.initializer.extend(model.graph.initializer)
        infer(given)
        found = [d.dim_value for d in given.graph.output[0].type.tensor_type.shape.dim]
        assert found == list(session.run(None, {"x": np.ones((1, 1, size), "f")})[0].shape)


@pytest.mark.parametrize(
    "bounds",
    [
        (2**63 - 1, -(2**63), -(2**62 - 1)),
        (-(2**63), 2**63 - 1, 2**62),
        (622121725580376097, 185987009967995912, -218067357806190081),
        (0, 2**62, 2**50),
        (7, -6, -4),
        (7, 9, -4),
    ],
)
def test_ranges_of_large_steps(bounds: tuple[int, int, int]) -> None:
    """Folded ones and their sizes alone: the differences of bounds need more than 64 bits, and
    counts more than 53."""
    model = parsed("m (float[1] x) => (int64[n] y) { y = Range(start, limit, delta) }", 20)
    for name, bound in zip(("start", "limit", "delta"), bounds, strict=True):
        model.graph.initializer.append(numpy_helper.from_array(np.array(bound, np.int64), name))
    wanted = run_plainly(model).run(None, {"x": np.ones(1, np.float32)})[0]
    walk = Walk(model)
    results = walk.evaluate(model.graph.node[0])
    walk.infer(model.graph.node[0])
    assert walk.shape("y") == wanted.shape
    assert results is None or np.array_equal(results[0], wanted)
    assert results is not None or wanted.size > 1000


@pytest.mark.matrix(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", ["2,3,5", "2,3,13", "B,3,5", "B,3,N"])
@pytest.mark.parametrize(
    "node",
    [
        "MaxPool<kernel_shape = [2], strides = [2], pads = [1, 1], ceil_mode = 1>(x)",
        "AveragePool<kernel_shape = [2], strides = [5], pads = [0, 1], ceil_mode = 1>(x)",
        "AveragePool<kernel_shape = [3], strides = [4], pads = [1, 0], ceil_mode = 1, "
        "count_include_pad = 1>(x)",
        "LpPool<kernel_shape = [1], strides = [3], ceil_mode = 1>(x)",
        "MaxPool<kernel_shape = [3], dilations = [2], auto_pad = 'SAME_UPPER'>(x)",
        "Resize<mode = 'linear'>(x, , s)",
    ],
)
def test_ranks_compute_these_sizes(node: str, dims: str, layout: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    node = node.replace("'", '"')
    scales = "float[3] s = {1.0, 1.0, 1.4}"
    model = parsed(f"m (float[{dims}] x) => (float[a,b,c] y) <{scales}> {{ y = {node} }}", 18)
    onnx.save(model, path)
    sharder.shard(path, tmp_path / "model.par", options(layout, strategy=LAYOUTS[layout]))
    with ThreadSession(tmp_path / "model.par", timeout=TIMEOUT) as session:
        for size in (5, 10, 13) if "N" in dims else (int(dims[4:]),):
            x = np.random.default_rng(size).standard_normal((2, 3, size)).astype(np.float32)
            (wanted,) = run_unsplit(path, {"x": x})
            (found,) = session.run(None, {"x": x})
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_gradients_behind_these_sizes(op: str, size: int, tmp_path: Path) -> None:
    """The gradient of `sum(a * a)` with respect to `w`, of which the first element is alone in its
    window, and each other pair in another."""
    node = f"{op}<kernel_shape = [2], strides = [2], pads = [1, 1], ceil_mode = 1>(w)"
    squares = f"a = {node} b = Mul(a, a) s = ReduceSum<keepdims = 0>(b) r = Mul(s, x)"
    model = parsed(f"m (float x) => (float r) {{ {squares} }}", 18)
    w = np.arange(1, size + 1, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w.reshape(1, 1, -1), "w"))
    onnx.save(model, tmp_path / "model.onnx")
    step = tmp_path / "step.onnx"
    grad(tmp_path / "model.onnx", step, loss="r", optimizer=None, params=["w"])
    (found,) = ort.InferenceSession(step).run(["w.grad"], {"x": np.array(1, np.float32)})
    pairs = w[1:].reshape(-1, 2)
    each = pairs * [0, 2] if op == "MaxPool" else pairs.mean(1, keepdims=True) * [1, 1]
    assert found.reshape(-1).tolist() == [2.0, *each.reshape(-1)]
