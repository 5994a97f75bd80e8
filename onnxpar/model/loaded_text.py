"""A model that is being loaded, as text."""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.model.interchange import export_graph

_SHOWN = 16
"""Elements of an initializer whose values are shown."""


def loaded_text(graph: onnx.ModelProto | gs.Graph) -> str:
    """ONNX's own text of a model, in which large initializers have a type and a shape only."""
    model = graph if isinstance(graph, onnx.ModelProto) else export_graph(graph, onnx.ModelProto())
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
    count = 1
    for size in tensor.dims:
        count *= size
    return count <= _SHOWN and tensor.data_location != TensorProto.EXTERNAL
