"""Repairs violations of the ONNX standard that onnxruntime tolerates, and that exporters write."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import GraphProto, TensorProto, TypeProto

from onnxpar.graph.stored import graphs_of, nodes_of, reads_of, stored_tensors
from onnxpar.graph.subgraphs import scopes
from onnxpar.graph.tensors import tensor_shape

_TYPED = (
    "float_data",
    "int32_data",
    "string_data",
    "int64_data",
    "double_data",
    "uint64_data",
)
"""Fields that may have a tensor's elements instead of raw_data."""
_FLAGS = ("keepdims", "noop_with_empty_axes", "ceil_mode")
"""Attributes that are on where they are 1."""


def restate(model: onnx.ModelProto) -> None:
    """Repairs a model in place; its results stay the same.

    Sorts nodes, drops unnamed and repeated entries, removes declared sizes that are not positive,
    and writes ONNX's own domain as "" instead of "ai.onnx".
    """
    for tensor in stored_tensors(model.graph):
        _keep_one_value(tensor)
    for node in nodes_of(model.graph):
        if node.domain == "ai.onnx":
            node.domain = ""
    _one_import(model)
    for port in model.graph.input:
        _open_sizes(port.type, below=0)
    _return_once(model.graph)
    for graph in graphs_of(model.graph):
        _restate_graph(graph)


def restate_flags(graph: GraphProto) -> None:
    """Writes flags of reductions and pools that are neither 0 nor 1 as 0, in place, also in
    subgraphs: so onnxruntime reads them."""
    for node in nodes_of(graph):
        if node.op_type.startswith(("Reduce", "Arg")) or node.op_type.endswith("Pool"):
            for attribute in node.attribute:
                if attribute.name in _FLAGS and attribute.i not in (0, 1):
                    attribute.i = 0


def scalar_bounds(graph: gs.Graph) -> None:
    """Reshapes the bounds of each Range to scalars, in place. onnxruntime accepts a vector of one
    element only where it does not know its shape before a run; in a rank's graph it may know the
    shape."""
    for scope in scopes(graph):
        nodes = list[gs.Node]()
        for node in scope.nodes:
            for i, tensor in enumerate(node.inputs if node.op == "Range" else ()):
                if tensor_shape(tensor) != ():
                    name = f"{node.name}::bound{i}"
                    node.inputs[i] = gs.Variable(name, tensor.dtype, [])
                    none = gs.Constant(f"{name}::shape", np.zeros(0, np.int64))
                    nodes.append(gs.Node("Reshape", name, {}, [tensor, none], [node.inputs[i]]))
            nodes.append(node)
        scope.nodes = nodes


def _keep_one_value(tensor: TensorProto) -> None:
    """Drops data of a tensor that onnxruntime ignores: typed fields beside raw_data, and references
    to external data if the tensor is not external."""
    if tensor.HasField("raw_data"):
        for field in _TYPED:
            tensor.ClearField(field)
    if tensor.data_location != TensorProto.EXTERNAL:
        del tensor.external_data[:]


def _one_import(model: onnx.ModelProto) -> None:
    """Leaves a single import of ONNX's own domain, under the name ""."""
    own = [o for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if own:
        version = own[-1].version
        others = [o for o in model.opset_import if o.domain not in ("", "ai.onnx")]
        _replace(model.opset_import, [onnx.helper.make_opsetid("", version), *others])


def _return_once(graph: GraphProto) -> None:
    """Removes repeated outputs of the main graph. Bodies of If, Loop or Scan may return a tensor
    twice."""
    outputs = {port.name: port for port in reversed(graph.output)}
    if len(outputs) < len(graph.output):
        _replace(graph.output, [*outputs.values()][::-1])


def _restate_graph(graph: GraphProto) -> None:
    """Repairs one graph: drops unnamed and repeated entries and sizes that are not positive, and
    sorts nodes."""
    refused = [t for t in graph.initializer if not t.name and not t.data_type]
    stored = {t.name: t for t in graph.initializer if t.name}  # of equal names, the last counts
    if len(stored) < len(graph.initializer):
        _replace(graph.initializer, [*stored.values(), *refused])
    typed = {p.name: p for p in graph.value_info if p.name and p.type.WhichOneof("value")}
    if len(typed) < len(graph.value_info):
        _replace(graph.value_info, list(typed.values()))
    for port in (*graph.output, *graph.value_info):
        _open_sizes(port.type, below=1)
    order = _sorted(graph)
    if order != list(range(len(order))):
        nodes = list(graph.node)
        _replace(graph.node, [nodes[i] for i in order])


def _replace(field: Any, messages: list[Any]) -> None:
    copies = [type(m).FromString(m.SerializeToString()) for m in messages]
    del field[:]
    field.extend(copies)


def _open_sizes(type_: TypeProto, below: int) -> None:
    """Removes sizes less than `below` from a type, which old exporters write where any size is
    allowed."""
    for dim in type_.tensor_type.shape.dim if type_.HasField("tensor_type") else ():
        if dim.HasField("dim_value") and dim.dim_value < below:
            dim.ClearField("dim_value")


def _sorted(graph: GraphProto) -> list[int]:
    """Returns the positions of the nodes in a topological order that is close to the order of the
    file; nodes in a cycle keep their order."""
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    waits = [
        {makers[n] for n in reads_of(node) if n in makers} - {i}
        for i, node in enumerate(graph.node)
    ]
    if all(max(needs, default=-1) < i for i, needs in enumerate(waits)):
        return list(range(len(waits)))
    order: list[int] = []
    placed: set[int] = set()
    for i in range(len(waits)):
        path = [i] if i not in placed else []
        on_path = set(path)
        while path:
            missing = waits[path[-1]] - placed - on_path
            if missing:
                path.append(min(missing))
                on_path.add(path[-1])
            else:
                order.append(path[-1])
                placed.add(path[-1])
                on_path.discard(path.pop())
    return order
