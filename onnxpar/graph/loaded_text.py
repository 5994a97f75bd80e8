"""The text of a model during loading, for dumps."""

from __future__ import annotations

import math

import onnx
from onnx import TensorProto

_SHOWN = 16
"""Initializers with at most this many elements are shown with values."""


def loaded_text(model: onnx.ModelProto) -> str:
    """Returns ONNX's own text of a model, in which large initializers have only a type and a
    shape."""
    shown = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    own = shown.graph
    own.name = model.graph.name
    own.node.extend(model.graph.node)
    own.input.extend(model.graph.input)
    own.output.extend(model.graph.output)
    own.value_info.extend(model.graph.value_info)
    shown.functions.extend(model.functions)
    for tensor in model.graph.initializer:
        if _is_small(tensor):
            own.initializer.append(tensor)
        else:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            own.value_info.append(value)
    return onnx.printer.to_text(shown)


def _is_small(tensor: TensorProto) -> bool:
    return math.prod(tensor.dims) <= _SHOWN and tensor.data_location != TensorProto.EXTERNAL
