"""Tiny models built by hand, and a check of a sharded one against onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

import onnxpar
from onnxpar.report.compare import compare
from onnxpar.runtime.session.threads import ThreadSession

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
STRING = TensorProto.STRING
RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((6, 4)).astype(np.float32)
W = RANDOM.standard_normal((4, 6)).astype(np.float32)
TP = {"shard": {"mm": [[None, None], [None, "tp"]]}}


def port(name: str, shape: Sequence[int | str] | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Mapping[str, np.ndarray] | None = None,
    opset: int = 18,
    ir: int = 8,
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    stored = [numpy_helper.from_array(w, n) for n, w in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), stored)
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir)


def write(proto: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def agree(
    proto: onnx.ModelProto,
    folder: Path,
    feeds: Mapping[str, Any],
    ranks: int = 2,
    *more: Mapping[str, Any],
    **options: Any,
) -> onnxpar.Plan:
    """Shards, runs each of the feeds on threads, and compares every output."""
    path = write(proto, folder)
    options.setdefault("preset", "data-parallel")
    if "strategy" in options:
        options["preset"] = None
        options["mesh"] = f"tp={ranks}"
    else:
        options["devices"] = ranks
    plan = onnxpar.shard(path, folder / "m.par", check_layouts=True, **options)
    with ThreadSession(folder / "m.par") as session:
        for each in (feeds, *more):
            report = compare(path, session, each)
            assert report.ok, report.text()
    return plan


def product(**fields: Any) -> onnx.ModelProto:
    """y = relu(x @ w)."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "mm"),
        helper.make_node("Relu", ["h"], ["y"], "relu"),
    ]
    return model(nodes, [port("x", [6, 4])], [port("y", [6, 6])], {"w": W}, **fields)
