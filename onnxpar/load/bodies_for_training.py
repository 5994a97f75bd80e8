"""Replaces ops without a gradient by the function bodies with which ONNX defines them, for models
that are about to be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnx.defs
import onnx.shape_inference
from onnx import FunctionProto, NodeProto, TypeProto, ValueInfoProto

from onnxpar.graph.stored import (
    copy_with_stubs,
    graphs_of,
    is_folded,
    nodes_of,
    onnx_opset,
    without_data,
)

OPS = frozenset({"LinearAttention", "CausalConvWithState"})
"""Recurrences of opset 27: their bodies are a Scan, and a Conv."""
DOMAIN = "onnxpar.body"


def add_bodies(model: onnx.ModelProto) -> None:
    """Turns each node whose op is in OPS into a call of a function of the model, in place. A node
    whose operands have unknown types stays as it is."""
    opset = onnx_opset(model)
    nodes = [n for n in nodes_of(model.graph) if _is_one(n, opset)]
    types = _types(model) if nodes else {}
    for number, node in enumerate(nodes):
        body = _body(node, types)
        if body is None:
            continue
        body.name, body.domain = f"{node.op_type}_{number}", DOMAIN
        model.functions.append(body)
        node.op_type, node.domain = body.name, DOMAIN
        del node.attribute[:]
    if model.functions and all(o.domain != DOMAIN for o in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))


def _is_one(node: NodeProto, opset: int) -> bool:
    """True for a node whose op is in OPS, and exists in `opset`."""
    is_onnx = node.domain in ("", "ai.onnx")
    return is_onnx and node.op_type in OPS and onnx.defs.has(node.op_type, opset)


def _types(model: onnx.ModelProto) -> Mapping[str, TypeProto]:
    """Returns the types of tensors by name, as far as ONNX infers them."""
    bare = copy_with_stubs(model, lambda t: None if is_folded(t) else without_data(t))
    inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
    ports: list[ValueInfoProto] = []
    for graph in graphs_of(inferred):
        ports += [*graph.value_info, *graph.input, *graph.output]
    types = {port.name: port.type for port in ports}
    for tensor in model.graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    return types


def _body(node: NodeProto, types: Mapping[str, TypeProto]) -> FunctionProto | None:
    """Returns the function body with which ONNX defines a node's op, for operands of these types;
    None if it depends on a type that is unknown."""
    schema: Any = onnx.defs.get_schema(node.op_type, "")  # its stubs lack what follows
    operands = [types.get(name, TypeProto()) if name else TypeProto() for name in node.input]
    version = max(schema.context_dependent_function_opset_versions)
    text = schema.get_context_dependent_function_with_opset_version(
        version, node.SerializeToString(), [t.SerializeToString() for t in operands]
    )
    return FunctionProto.FromString(text) if text else None
