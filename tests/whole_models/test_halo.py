"""Images split along space, with the real plugin: ranks exchange the rows that windows reach."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import check_agrees, options
from committed import MODELS
from onnx import numpy_helper

from onnxpar.compiler.plan import Plan

HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'
CHAIN = "float[1,3,23,17] x, float[8,3,7,7] w0, float[8] w1, float[8,8,3,3] w2, float[6,8,3,3] w3"
NETWORKS = {
    "chain": f"""chain ({CHAIN}, float[6,5,3,3] w4) => (float[1,5,11,9] y)
    {{ a = Conv<pads=[3,3,3,3], strides=[2,2]>(x, w0, w1)  r = Relu(a)
       p = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(r)
       c = Conv<pads=[1,1,1,1]>(p, w2)  s = Add(c, p)
       d = Conv<auto_pad="SAME_UPPER">(s, w3)
       e = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(d)
       y = ConvTranspose<strides=[2,2], pads=[1,1,1,1]>(e, w4) }}""",
    # down, up, and what both hold joined
    "skip": """skip (float[2,3,14,12] x, float[4,3,3,3] w0, float[4,4,2,2] w1, float[4,4,2,2] w2,
        float[3,8,3,3] w3) => (float[2,3,14,12] y)
    <float[4] twice = {1, 1, 2, 2}, float none = {0}>
    { a = Conv<pads=[1,1,1,1]>(x, w0)  b = Conv<strides=[2,2]>(a, w1)
      c = ConvTranspose<strides=[2,2]>(b, w2)  m = Concat<axis=1>(a, c)
      d = Conv<pads=[1,1,1,1]>(m, w3)  e = AveragePool<kernel_shape=[2,2], strides=[2,2]>(d)
      y = Resize<mode="linear">(e, , twice) }""",
    # borders that are copies, and every second row
    "border": """border (float[1,2,13,11] x, float[4,2,3,3] w0, float[3,4,3,3] w1)
        => (float[1,3,7,6] y)
    <int64[8] around = {0, 0, 2, 1, 0, 0, 2, 1}, int64[2] from = {0, 0}, int64[2] to = {99, 99},
     int64[2] axes = {2, 3}, int64[2] steps = {2, 2}, int64[8] one = {0, 0, 1, 1, 0, 0, 1, 1}>
    { p = Pad<mode="reflect">(x, around)  a = Conv<pads=[0,1,0,1]>(p, w0)
      s = Slice(a, from, to, axes, steps)  q = Pad(s, one)  z = Conv(q, w1)
      y = Clip(z) }""",
}
TP = [None, None, "tp", None]


def write(name: str, folder: Path) -> Path:
    """Saves a network; inputs of which the name starts with `w` become weights."""
    model = onnx.parser.parse_model(HEAD + NETWORKS[name])
    rng = np.random.default_rng(3)
    for port in [i for i in model.graph.input if i.name.startswith("w")]:
        shape = [d.dim_value for d in port.type.tensor_type.shape.dim]
        value = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, port.name))
        model.graph.input.remove(port)
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return path


def split(path: Path, folder: Path, mesh: str, dims: list[Any], name: str = "x") -> Plan:
    return check_agrees(path, folder, options(mesh, strategy={"tensors": {name: dims}}))


def kinds(plan: Plan) -> Counter[str]:
    return Counter(c.kind for c in plan.collectives)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "dims"),
    [
        ("tp=2", TP),
        ("tp=3", TP),
        ("tp=4", TP),
        ("tp=2", [None, None, None, "tp"]),
        ("tp=3", [None, None, None, "tp"]),
        ("a=2,b=2", [None, None, "a", "b"]),
        ("a=2,b=2", [None, None, ["b", "a"], None]),
        ("tp=3", [None, None, {"tp": [9, 3, 11]}, None]),
    ],
)
def test_a_network_over_space(mesh: str, dims: list[Any], tmp_path: Path) -> None:
    plan = split(write("chain", tmp_path), tmp_path, mesh, dims)
    assert set(kinds(plan)) <= {"NeighborExchange", "AllToAll"} and not plan.whole
    assert kinds(plan)["NeighborExchange"] >= 5


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["skip", "border"])
@pytest.mark.parametrize(
    ("mesh", "dims"),
    [("tp=2", TP), ("tp=3", TP), ("tp=3", [*TP[:2], None, "tp"]), ("a=2,b=2", [*TP[:2], "a", "b"])],
)
def test_layers_over_space(name: str, mesh: str, dims: list[Any], tmp_path: Path) -> None:
    plan = split(write(name, tmp_path), tmp_path, mesh, dims)
    assert set(kinds(plan)) <= {"NeighborExchange", "AllToAll"} and not plan.whole


def test_windows_side_by_side_need_no_exchange(tmp_path: Path) -> None:
    plan = split(write("skip", tmp_path), tmp_path, "tp=3", [None, None, None, "tp"])
    exchanging = {c.name.split("::")[0] for c in plan.collectives}
    assert exchanging == {"Conv_a", "Conv_d", "Resize_y"}


MODEL_INPUTS = {"resnet": "pixel_values", "mobilenet": "pixel_values", "unet": "sample"}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4", "a=2,b=2"])
@pytest.mark.parametrize("name", MODEL_INPUTS)
def test_model_over_height(name: str, mesh: str, tmp_path: Path) -> None:
    dims = [None, None, "a", "b"] if "," in mesh else TP
    plan = split(MODELS / f"{name}.dynamo.static.onnx", tmp_path, mesh, dims, MODEL_INPUTS[name])
    assert kinds(plan)["NeighborExchange"] >= 8
    convolutions = [w for w in plan.whole if w.op == "Conv"]
    assert len(convolutions) <= {"tp=2": 0, "a=2,b=2": 0}.get(mesh, 6)  # 2 rows over 3 ranks
