"""How far the results of a model move by themselves, where it rounds to few values as it runs.

A value that a model quantizes in a run may lie between two steps, so that a change in the last bits
of a float32, as from another order of a sum, moves it by a whole step. Two correct ways to run such
a model then differ by far more than they round. By how much, runs of the unsplit model tell.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import AttributeProto, NodeProto, TensorProto, numpy_helper

from onnxpar.arrays import Array
from onnxpar.runtime.tensors import as_fed

RUNS, CHANGE, MARGIN = 16, 2.0**-18, 2.0
"""Runs of the unsplit model in which small weights, and floats that are fed, change by up to this
share of each element; results may be off by so many times what they move at most."""
_READ_AT_MOST = 1 << 16
_ROUND = frozenset(
    (
        "DynamicQuantizeLinear",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "QuantizeLinear",
    )
)
_INTEGERS = 4
"""The accuracy level at which MatMulNBits quantizes its first operand."""
_READERS = frozenset(("Mul", "Add", "Gather"))
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


def movements(
    model: str | os.PathLike[str] | bytes, feeds: Mapping[str, Any], reference: Mapping[str, Any]
) -> dict[str, float]:
    """By output, the most that it moves, as a share of its largest magnitude; nothing for a model
    that rounds nothing as it runs, or whose inputs or outputs are no tensors of numbers."""
    proto = _read(model)
    if not any(map(_rounds, _nodes(proto))):
        return {}
    weights = _open_weights(proto, None if isinstance(model, bytes) else Path(model).parent)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if not isinstance(model, bytes):
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, str(Path(model).resolve().parent))
    names = [port.name for port in proto.graph.output]
    if any(not isinstance(a, np.ndarray) for a in (*feeds.values(), *reference.values())):
        return {}
    session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    moved = dict.fromkeys(names, 0.0)
    for _ in range(RUNS):
        changed = {n: as_fed(_changed(a, random)) for n, a in {**weights, **feeds}.items()}
        for name, result in zip(names, session.run(names, changed), strict=True):
            moved[name] = max(moved[name], _distance(result, reference[name]))
    return moved


def _read(model: str | os.PathLike[str] | bytes) -> onnx.ModelProto:
    if isinstance(model, bytes):
        return onnx.load_model_from_string(model)
    return onnx.load(os.fspath(model), load_external_data=False)


def _nodes(proto: onnx.ModelProto) -> Iterator[NodeProto]:
    """All nodes, those of bodies and functions included."""
    todo: list[Iterable[NodeProto]] = [proto.graph.node, *(f.node for f in proto.functions)]
    while todo:
        for node in todo.pop():
            yield node
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    todo.append(attribute.g.node)
                todo += [graph.node for graph in attribute.graphs]


def _rounds(node: NodeProto) -> bool:
    """Whether a node rounds what depends on inputs to few values."""
    if node.op_type == "MatMulNBits":
        return any(a.name == "accuracy_level" and a.i == _INTEGERS for a in node.attribute)
    return node.op_type in _ROUND


def _open_weights(proto: onnx.ModelProto, folder: Path | None) -> dict[str, Array]:
    """Makes small weights, as norms and biases have, inputs in place, and returns them."""
    read = {
        name
        for node in proto.graph.node
        if node.op_type in _READERS or node.op_type.endswith("Normalization")
        for name in node.input
    }
    ports = {port.name for port in proto.graph.input}
    found = {}
    for tensor in proto.graph.initializer:
        is_small = 1 < math.prod(tensor.dims) <= _READ_AT_MOST and len(tensor.dims) > 0
        if is_small and tensor.name in read - ports and tensor.data_type in _FLOATS:
            found[tensor.name] = numpy_helper.to_array(tensor, str(folder or ""))
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            proto.graph.input.append(info)
    return found


def _changed(value: Array, random: np.random.Generator) -> Array:
    """Floats that differ by up to CHANGE of each, or by a last bit where that is more."""
    if value.dtype not in (np.float32, np.float16):
        return value
    share = max(CHANGE, float(np.finfo(value.dtype).eps))
    factors = 1 + share * random.uniform(-1, 1, value.shape)
    changed: Array = (value * factors).astype(value.dtype)
    return changed


def _distance(result: Array, reference: Array) -> float:
    """The largest finite difference, as a share of the largest magnitude."""
    if result.dtype.kind != "f" or result.shape != reference.shape:
        return 0.0
    a, b = result.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    largest = np.abs(b[finite]).max(initial=0)
    return float(np.abs(a - b)[finite].max(initial=0) / largest) if largest else 0.0
