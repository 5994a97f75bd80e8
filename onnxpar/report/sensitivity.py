"""Measures how much rounding changes the results of a model, if errors are larger than usual.

A model may amplify rounding errors: it quantizes activations, so that a value between two
quantization steps changes by a full step; it divides by a standard deviation that is nearly 0; it
ends in a sigmoid whose largest value is 1e-7. Then two correct runs differ by much more than
rounding errors. Runs of the unsplit model measure this: on one thread, with and without
optimization, with feeds and small weights changed in their last bits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import AttributeProto, NodeProto, TensorProto
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from onnxpar.base.arrays import Array
from onnxpar.base.custom_ops import quiet_options
from onnxpar.graph.stored import read_stored
from onnxpar.load.read_file import read_proto
from onnxpar.runtime.session.tensors import as_fed

RUNS, CHANGE, COARSE_CHANGE, MARGIN = 16, 2.0**-22, 2.0**-18, 2.0
"""RUNS: number of runs of the unsplit model. CHANGE: the largest relative change of each element of
small weights and float inputs in these runs. COARSE_CHANGE: the same for models that round to steps
(larger, since few values are close to a step). MARGIN: an error may be this many times the largest
measured change of a result."""
LARGE = 0.05
"""If rounding changes a result by this fraction or more, a comparison may not notice that a rank's
term of a sum is missing."""
_STEPS = frozenset(
    (
        "ArgMax",
        "ArgMin",
        "Ceil",
        "DequantizeLinear",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeLinear",
        "DynamicQuantizeMatMul",
        "Floor",
        "NonMaxSuppression",
        "QMoE",
        "QuantizeLinear",
        "Round",
        "Sign",
        "TopK",
    )
)
"""Ops that round to steps; DequantizeLinear does so if onnxruntime fuses it with a product that
reads its result."""
_INTEGERS = 4
"""The accuracy_level at which MatMulNBits quantizes its first operand."""
_READ_AT_MOST, _ALL_AT_MOST = 1 << 18, 1 << 24
"""Most elements of a weight that is changed, and of all such weights together."""
_READERS = frozenset(("Mul", "Add", "Gather"))
"""Ops whose weights may become inputs of a model that is optimized, because onnxruntime fuses these
ops even with weights that are not constant."""
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
_LEVELS = (ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
_Opens = Callable[[NodeProto], bool]
"""Returns True for a node whose weights are to be changed."""
ORT_ERRORS = (
    RuntimeError,
    ValueError,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)
"""The exceptions of onnxruntime."""


def movements(
    model: str | os.PathLike[str] | bytes,
    feeds: Mapping[str, Any],
    reference: Mapping[str, Any],
    folder: str | os.PathLike[str] | None = None,
) -> dict[str, float]:
    """Returns how much rounding changes each result in `reference`, by name: the largest measured
    change, for floats relative to the largest magnitude, for other dtypes as the fraction of
    elements that change. Empty if inputs or results are not tensors of numbers, or if onnxruntime
    cannot run the changed model.

    reference  the results of an ordinary run
    folder     where external data is, if `model` is bytes
    """
    if any(not isinstance(a, np.ndarray) for a in (*feeds.values(), *reference.values())):
        return {}
    if folder is None and not isinstance(model, bytes):
        folder = Path(model).resolve().parent
    names = list(reference)
    moved: dict[str, float] = {}
    random = np.random.default_rng(0)
    change = COARSE_CHANGE if any(map(_has_steps, _nodes(read_model(model)))) else CHANGE
    for level in _LEVELS:
        is_optimized = level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        for opens in (
            (_adds_or_scales, _none) if is_optimized else (_computes_alike, _adds_or_scales, _none)
        ):
            proto = read_model(model)
            weights = _open_weights(proto, folder, opens)
            own = {**weights, **feeds}
            try:
                session = _session(proto, level, folder)
                for _ in range(RUNS // len(_LEVELS)):
                    changed = {n: as_fed(_changed(a, change, random)) for n, a in own.items()}
                    for name, result in zip(names, session.run(names, changed), strict=True):
                        far = _distance(result, reference[name])
                        moved[name] = max(moved.get(name, 0.0), far)
                break
            except ORT_ERRORS:  # a kernel may need constant weights
                continue
    return moved


def _session(
    proto: onnx.ModelProto, level: Any, folder: str | os.PathLike[str] | None
) -> ort.InferenceSession:
    options = quiet_options(1)
    options.graph_optimization_level = level
    if folder is not None:
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, str(Path(folder).resolve()))
    return ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])


def read_model(model: str | os.PathLike[str] | bytes) -> onnx.ModelProto:
    """Returns the model of a file or of bytes, without its external data. Errors: ModelError for a
    file that cannot be read."""
    if isinstance(model, bytes):
        return onnx.load_model_from_string(model)
    return read_proto(Path(model))


def _nodes(proto: onnx.ModelProto) -> Iterator[NodeProto]:
    """Yields all nodes, including those of bodies and functions."""
    todo: list[Iterable[NodeProto]] = [proto.graph.node, *(f.node for f in proto.functions)]
    while todo:
        for node in todo.pop():
            yield node
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    todo.append(attribute.g.node)
                todo += [graph.node for graph in attribute.graphs]


def _has_steps(node: NodeProto) -> bool:
    if node.op_type == "MatMulNBits":
        return any(a.name == "accuracy_level" and a.i == _INTEGERS for a in node.attribute)
    return node.op_type in _STEPS


def _adds_or_scales(node: NodeProto) -> bool:
    return node.op_type in _READERS or node.op_type.endswith("Normalization")


def _computes_alike(node: NodeProto) -> bool:
    """True for standard ops except quantization. Other ops may need constant weights."""
    return node.domain == "" and node.op_type not in ("QuantizeLinear", "DequantizeLinear")


def _none(node: NodeProto) -> bool:
    return False


def _open_weights(
    proto: onnx.ModelProto, folder: str | os.PathLike[str] | None, opens: _Opens
) -> dict[str, Array]:
    """Turns small weights into inputs, in place, so that they can be changed; returns their values
    by name.

    folder  where external data is
    opens   True for a node whose weights are meant
    """
    read = {name for node in proto.graph.node if opens(node) for name in node.input}
    ports = {port.name for port in proto.graph.input}
    ports |= {n for node in proto.graph.node if not opens(node) for n in node.input}
    weights, left = {}, _ALL_AT_MOST
    for tensor in proto.graph.initializer:
        size = math.prod(tensor.dims)
        is_small = 1 < size <= min(_READ_AT_MOST, left) and len(tensor.dims) > 0
        if is_small and tensor.name in read - ports and tensor.data_type in _FLOATS:
            weights[tensor.name] = read_stored(tensor, Path(folder or ""))
            left -= size
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            proto.graph.input.append(info)
    return weights


def _changed(value: Array, change: float, random: np.random.Generator) -> Array:
    """Returns an array of float32 or float16 with each element changed at random, by up to the
    relative amount `change`, or up to its last bit if that is more. Returns other arrays unchanged.
    """
    if value.dtype not in (np.float32, np.float16):
        return value
    share = max(change, float(np.finfo(value.dtype).eps))
    factors = 1 + share * random.uniform(-1, 1, value.shape)
    changed: Array = (value * factors).astype(value.dtype)
    return changed


def _distance(result: Array, reference: Array) -> float:
    """Returns the largest finite difference, relative to the largest magnitude; for integers and
    bools, the fraction of elements that differ."""
    if result.shape != reference.shape or not reference.size:
        return 0.0
    if reference.dtype.kind in "iub":
        return float(np.mean(result != reference))
    if not is_float(reference):
        return 0.0
    a, b = result.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    largest = np.abs(b[finite]).max(initial=0)
    return float(np.abs(a - b)[finite].max(initial=0) / largest) if largest else 0.0


def is_float(value: Array) -> bool:
    """True for an array of floating-point elements, including bfloat16 of ml_dtypes."""
    return value.dtype.kind == "f" or value.dtype.name == "bfloat16"
