"""Models restated in float64: all that was float32 in them is twice as wide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, numpy_helper

TYPES = frozenset({"to", "dtype", "output_dtype", "stash_type"})
"""Attributes that are types of tensors, or of what is between them."""


def write_double(model: Path, path: Path) -> None:
    """Writes the same function of float64."""
    proto = onnx.load(model)
    widen(proto.graph)
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)


def widen(graph: GraphProto) -> None:
    """Makes float64 of every float32, in place."""
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    del graph.value_info[:]
    for port in (*graph.input, *graph.output):
        _widen_type(port.type)
    for node in graph.node:
        for attribute in node.attribute:
            _widen_attribute(node, attribute)


def _widen_attribute(node: NodeProto, attribute: AttributeProto) -> None:
    if attribute.name in TYPES and attribute.i == TensorProto.FLOAT:
        attribute.i = TensorProto.DOUBLE
    for tensor in _tensors(attribute):
        _widen_tensor(tensor)
    for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
        widen(graph)
    if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
        values = attribute.f if attribute.name == "value_float" else list(attribute.floats)
        array = np.asarray(values, np.float64)
        attribute.Clear()
        attribute.CopyFrom(onnx.helper.make_attribute("value", numpy_helper.from_array(array)))


def _tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        array = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _widen_type(type_: TypeProto) -> None:
    if type_.tensor_type.elem_type == TensorProto.FLOAT:
        type_.tensor_type.elem_type = TensorProto.DOUBLE
