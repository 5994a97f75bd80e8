"""A small mixture of experts whose router's decisions are inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.parser
from agreement import options
from onnx import TensorProto, helper, numpy_helper

from onnxpar.cost.topology import Topology
from onnxpar.planner.options import Options

SLOW = Topology.of(
    {"levels": [{"name": "host", "latency": 0.0, "bandwidth": 1e6}], "device": {"launch": 0.0}}
)
"""Links on which only bytes count, so that ranks exchange rows."""
NETWORK = {"name": "network", "latency": 0.0, "bandwidth": "20 kB/s"}
HOST = {"name": "host", "size": 1, "latency": "1 us", "bandwidth": "2 GB/s"}
DEVICE = {"launch": 0.0, "flops": "10 kFLOP/s"}
HOSTS = Topology.of({"levels": [HOST, NETWORK], "device": DEVICE})
"""Hosts of one rank each that compute slowly."""
TEXT = """<ir_version: 8, opset_import: ["" : 17]>
mixture (TYPE[ROWS,4] x, int64[ROWS,SLOTS] ids, TYPE[ROWS,SLOTS] weights) => (TYPE[ROWS,3] y) <
  int64[1] zero = {0}, int64[1] two = {2}, int64[1] first = {0}
> {
  each = Unsqueeze (ids, zero)
  hot = Equal (each, experts)
  marks = Cast <to = KIND> (hot)
  count = ReduceSum <keepdims = 1> (marks, two)
  chosen = Cast <to = 9> (count)
  scaled = Mul (marks, weights)
  weight = ReduceSum <keepdims = 1> (scaled, two)
  a = Where (chosen, x, nothing)
  h = MatMul (a, w1)
  s = Sigmoid (h)
  g = Mul (h, s)
  b = MatMul (g, w2)
  c = Add (b, bias)
  m = Mul (c, weight)
  n = Tanh (m)
  d = Where (chosen, n, nothing)
  y = ReduceSum <keepdims = 0> (d, zero)
}"""


def mixture(
    experts: int, slots: int, rows: int | str, dtype: str = "float", width: int = 4,
    lines: Mapping[str, str] | None = None, hidden: int = 5, out: int = 3,
) -> onnx.ModelProto:  # fmt: skip
    """A model with the inputs x [rows, width], ids and weights [rows, slots], and the output y
    [rows, out]. `lines` replaces nodes, by result."""
    kind = TensorProto.FLOAT if dtype == "float" else TensorProto.FLOAT16
    text = TEXT
    for result, nodes in (lines or {}).items():
        text = re.sub(rf"(?m)^  {result} = .*$", nodes, text)
    text = text.replace("TYPE", dtype).replace("KIND", str(kind)).replace("SLOTS", str(slots))
    text = text.replace("ROWS", str(rows)).replace(",4] x", f",{width}] x")
    text = text.replace(",3] y", f",{out}] y")
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    of = np.float32 if dtype == "float" else np.float16
    stored: dict[str, Any] = {
        "experts": np.arange(experts).reshape(-1, 1, 1),
        "nothing": np.zeros((), of),
        "w1": random.standard_normal((experts, width, hidden)).astype(of),
        "w2": random.standard_normal((experts, hidden, out)).astype(of),
        "bias": random.standard_normal((experts, 1, out)).astype(of),
    }
    for name, value in stored.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def feeds_of(ids: Any, dtype: str = "float", width: int = 4) -> dict[str, np.ndarray]:
    """Random tokens for these decisions [row, slot]."""
    chosen = np.array(ids, np.int64)
    random = np.random.default_rng(1)
    of = np.float32 if dtype == "float" else np.float16
    return {
        "x": random.standard_normal((len(chosen), width)).astype(of),
        "ids": chosen,
        "weights": random.random(chosen.shape).astype(of),
    }


def exchanging(layout: str) -> Options:
    """Options for a layout, on slow links."""
    return options(layout, topology=SLOW)


def between_hosts(layout: str, overlap: str = "auto") -> Options:
    """Options for a layout, on hosts of one rank each."""
    return replace(options(layout, topology=HOSTS), overlap=overlap)


def beside_shared_expert(model: onnx.ModelProto, first: bool) -> onnx.ModelProto:
    """The mixture with a shared expert, which the export computes `first`, or last; its output is
    the sum z [rows, 3] of both."""
    graph = model.graph
    kind, width = graph.input[0].type.tensor_type.elem_type, 4
    random = np.random.default_rng(7)
    for name, shape in (("v1", (width, 6)), ("v2", (6, 3))):
        value = random.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(kind))
        graph.initializer.append(numpy_helper.from_array(value, name))
    shared = [
        helper.make_node("MatMul", ["normal", "v1"], ["p"], "shared.up"),
        helper.make_node("Tanh", ["p"], ["q"], "shared.act"),
        helper.make_node("MatMul", ["q", "v2"], ["r"], "shared.down"),
    ]
    normed = helper.make_node("Sigmoid", ["x"], ["normal"], "norm")
    nodes = list(graph.node)
    for node in graph.node:
        node.input[:] = ["normal" if name == "x" else name for name in node.input]
    nodes = [normed, *shared, *nodes] if first else [normed, *nodes, *shared]
    del graph.node[:]
    graph.node.extend([*nodes, helper.make_node("Add", ["y", "r"], ["z"], "both")])
    graph.output[0].name = "z"
    return model
