"""Converts ONNX protos to graphsurgeon graphs and back, and keeps what graphsurgeon loses.

Docs, metadata, non-tensor types and default values of inputs, for which graphsurgeon's objects have
no field, are attributes that we set on these objects, so that they move with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import (
    AttributeProto,
    GraphProto,
    NodeProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    numpy_helper,
)

from onnxpar.base.errors import ModelError
from onnxpar.graph.attribute_weights import AT, conceal, expose, has_attribute_weights
from onnxpar.graph.lazy_values import ExternalValues, StackedValues, stack_of, stored_proto
from onnxpar.graph.stored import graphs_of, subgraphs_of

gs.logger.G_LOGGER.severity = gs.logger.G_LOGGER.ERROR  # it warns of types that we keep ourselves
_LISTS = {
    AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings",
}
_SKIPPED = {
    AttributeProto.TENSORS: "tensors",
    AttributeProto.TYPE_PROTO: "tp",
    AttributeProto.TYPE_PROTOS: "type_protos",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.SPARSE_TENSORS: "sparse_tensors",
}
"""Kinds of attributes that graphsurgeon skips, and the fields of the proto that hold them."""


class _EmptyList(list[Any]):
    """An empty list attribute, with the type that its elements would have."""

    kind = AttributeProto.INTS


def default_of(tensor: gs.Tensor) -> TensorProto | None:
    """Returns the default value of a graph input; None for an input without one, and for any other
    tensor."""
    value: TensorProto | None = getattr(tensor, "onnx_default", None)
    return value


def is_weight(tensor: gs.Tensor) -> bool:
    """True if a tensor is stored with the model: a constant, or an input with a default value."""
    return isinstance(tensor, gs.Constant) or default_of(tensor) is not None


def declared_shape(tensor: gs.Tensor) -> tuple[int | None, ...] | None:
    """Returns the declared shape of a graph input or output of strings, with None for open sizes;
    None if the number of dimensions is open, and for other tensors, whose shape is in the graph."""
    source = _source(tensor)
    if source is None or _is_plain(source.type) or not source.type.HasField("tensor_type"):
        return None
    tensor_type = source.type.tensor_type
    if not tensor_type.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor_type.shape.dim)


def reopen(graph: gs.Graph, declared: Mapping[str, TypeProto]) -> None:
    """Opens again the sizes of string inputs and outputs that the model leaves open, after
    inference at sample sizes has set numbers. `declared` has the model's own types of inputs and
    outputs, by name."""
    for tensor in (*graph.inputs, *graph.outputs):
        source = _source(tensor)
        if declared_shape(tensor) is None:
            continue
        sizes = source.type.tensor_type.shape.dim
        own = declared[tensor.name].tensor_type.shape.dim
        for axis, dim in enumerate(sizes):
            if axis >= len(own) or own[axis] != dim:
                dim.Clear()


def type_text(tensor: gs.Tensor) -> str:
    """The type of a graph input or output in onnxruntime's notation: `tensor(float)`,
    `seq(tensor(float))`."""
    source = _source(tensor)
    if source is not None and not _is_plain(source.type):
        return _type_text(source.type)
    dtype = gs.exporters.onnx_exporter.dtype_to_onnx(tensor.dtype)
    return f"tensor({_element_text(dtype)})"


def _type_text(type_: TypeProto) -> str:
    kind = type_.WhichOneof("value")
    if kind == "sequence_type":
        return f"seq({_type_text(type_.sequence_type.elem_type)})"
    if kind == "optional_type":
        return f"optional({_type_text(type_.optional_type.elem_type)})"
    if kind == "map_type":
        key = _element_text(type_.map_type.key_type)
        return f"map({key},{_type_text(type_.map_type.value_type)})"
    if kind == "sparse_tensor_type":
        return f"sparse_tensor({_element_text(type_.sparse_tensor_type.elem_type)})"
    return f"tensor({_element_text(type_.tensor_type.elem_type)})"


def _element_text(element: int) -> str:
    return str(TensorProto.DataType.Name(element)).lower()


def import_graph(
    model: onnx.ModelProto, defaults: Mapping[str, TensorProto], folder: Path
) -> gs.Graph:
    """Returns the graph of a model without functions; afterwards the model must not be used.

    defaults  default values of inputs, by name
    folder    where external data is

    Strings, sequences, optionals and maps get no shape in the graph, so that they stay whole.
    Errors: ModelError for an attribute that is a list of graphs.
    """
    protos = list(graphs_of(model.graph))
    ports = [[_copy(p) for p in (*g.input, *g.output)] for g in protos]
    attributes = [_set_aside(node) for node in _nodes(model.graph)]
    for proto in protos:
        for port in (*proto.input, *proto.output, *proto.value_info):
            _blur(port.type)
    graph: gs.Graph = gs.import_onnx(model)
    nodes = zip(list(_gs_nodes(graph)), _nodes(model.graph), attributes, strict=True)
    for node, message, taken in nodes:
        node.attrs.update(taken)
        node.onnx_source = message
    for inner, proto, declared in zip(_gs_graphs(graph), protos, ports, strict=True):
        inner.onnx_source = proto
        by_name = {port.name: port for port in declared}
        for tensor in (*inner.inputs, *inner.outputs):
            tensor.onnx_source = by_name[tensor.name]
        for constant in _constants(inner):
            stored = stored_proto(constant)
            if stored is not None and stored.data_location == TensorProto.EXTERNAL:
                constant._values = ExternalValues(stored, folder)
    for tensor in graph.inputs:
        tensor.onnx_default = defaults.get(tensor.name)
    graph.ir_version = model.ir_version
    _read_constant_outputs(graph)
    expose(graph)
    return graph


def export_graph(
    graph: gs.Graph, header: onnx.ModelProto, stacks: dict[str, StackedValues] | None = None
) -> onnx.ModelProto:
    """Returns a graph as a model with the docs and metadata of what was imported.

    header  docs, metadata, version and producer of the model
    stacks  gets the values of stacked weights, by name, which then are not in the model; None: they
            are

    Constants that subgraphs capture are written once, in the graph that has them. Types of
    intermediate tensors are left to the runtime to infer.
    """
    graphs = list(_gs_graphs(graph))
    shown = [(node, list(node.inputs)) for node in _gs_nodes(graph) if has_attribute_weights(node)]
    conceal(node for node, _ in shown)
    for inner in graphs:
        for tensor in _constants(inner):
            stack = stack_of(tensor)
            if stack is not None and stacks is not None:
                stacks[tensor.name] = stack
            elif stack is not None or not isinstance(tensor._values, gs.ir.tensor.LazyValues):
                proto = numpy_helper.from_array(tensor.values, tensor.name)
                tensor._values = gs.ir.tensor.LazyValues(proto)
            elif tensor._values.tensor.name != tensor.name:  # shared with another constant
                tensor._values = copy(tensor._values)
                tensor._values.tensor = _named(tensor._values.tensor, tensor.name)
    nodes = list(_gs_nodes(graph))
    empty = [_take_empty(node) for node in nodes]
    model: onnx.ModelProto = gs.export_onnx(graph, do_type_check=False)
    model.ir_version = graph.ir_version  # older versions of graphsurgeon do not write it
    for node, message, lists in zip(nodes, _nodes(model.graph), empty, strict=True):
        message.attribute.extend(AttributeProto(name=k, type=v.kind) for k, v in lists.items())
        _describe(message, _source(node))
    for inner, proto in zip(graphs, graphs_of(model.graph), strict=True):
        _describe_graph(inner, proto)
    model.graph.initializer.extend(_hoist(graph, model.graph))
    _describe(model, header)
    for field in ("domain", "model_version", "producer_name", "producer_version"):
        setattr(model, field, getattr(header, field))
    for node, operands in shown:
        node.inputs.append(operands[AT])
    return model


def _named(tensor: TensorProto, name: str) -> TensorProto:
    other = TensorProto()
    other.CopyFrom(tensor)
    other.name = name
    return other


def declare_types(graph: gs.Graph, proto: GraphProto) -> None:
    """Adds the dtypes and shapes of all nodes' outputs to `proto`, the exported form of `graph`,
    and to its subgraphs."""
    for inner, message in zip(_gs_graphs(graph), graphs_of(proto), strict=True):
        ports = {port.name for port in (*message.input, *message.output)}
        for tensor in [t for node in inner.nodes for t in node.outputs]:
            known = tensor.dtype is not None and tensor.dtype != object
            if tensor.name and tensor.name not in ports and known:
                message.value_info.append(
                    onnx.helper.make_tensor_value_info(
                        tensor.name,
                        gs.exporters.onnx_exporter.dtype_to_onnx(tensor.dtype),
                        tensor.shape,
                    )
                )


def header_of(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model's docs, metadata, version and producer as a model without nodes."""
    header = onnx.ModelProto(metadata_props=model.metadata_props)
    for field in ("doc_string", "domain", "model_version", "producer_name", "producer_version"):
        if model.HasField(field):
            setattr(header, field, getattr(model, field))
    header.graph.name, header.graph.doc_string = model.graph.name, model.graph.doc_string
    return header


def metadata_of(header: onnx.ModelProto) -> dict[str, Any]:
    """Returns a model's metadata under the field names of onnxruntime's ModelMetadata."""
    version = {"version": header.model_version} if header.HasField("model_version") else {}
    return {
        "producer_name": header.producer_name,
        "graph_name": header.graph.name,
        "domain": header.domain,
        "description": header.doc_string,
        "graph_description": header.graph.doc_string,
        **version,
        "custom_metadata_map": {entry.key: entry.value for entry in header.metadata_props},
    }


def _source(holder: gs.Graph | gs.Node | gs.Tensor) -> Any:
    """Returns the proto from which a graph, node, or graph input or output was imported; None if a
    pass created it."""
    return vars(holder).get("onnx_source")  # getattr would log a warning for graphs without it


def _copy(port: ValueInfoProto) -> ValueInfoProto:
    copy = ValueInfoProto()
    copy.CopyFrom(port)
    return copy


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    return (node for inner in graphs_of(graph) for node in inner.node)


def _gs_graphs(graph: gs.Graph) -> Iterator[gs.Graph]:
    yield graph
    for node in graph.nodes:
        for value in node.attrs.values():
            if isinstance(value, gs.Graph):
                yield from _gs_graphs(value)


def _gs_nodes(graph: gs.Graph) -> Iterator[gs.Node]:
    return (node for inner in _gs_graphs(graph) for node in inner.nodes)


def _constants(graph: gs.Graph) -> Iterator[gs.Constant]:
    values = [v for node in graph.nodes for v in node.attrs.values()]
    return (t for t in (*graph.tensors().values(), *values) if isinstance(t, gs.Constant))


def _is_plain(type_: TypeProto) -> bool:
    """True for tensors of any dtype but strings, and for a missing type."""
    kind = type_.WhichOneof("value")
    return kind is None or (
        kind == "tensor_type" and type_.tensor_type.elem_type != TensorProto.STRING
    )


def _blur(type_: TypeProto) -> None:
    """Removes from a type what graphsurgeon cannot read: the shape of strings; the type itself if
    it is no tensor."""
    if type_.HasField("tensor_type"):
        if not _is_plain(type_):
            type_.tensor_type.ClearField("shape")
    else:
        type_.Clear()


def _set_aside(node: NodeProto) -> dict[str, Any]:
    """Removes the attributes from a node that graphsurgeon cannot read; returns their values, by
    name, in a form that its exporter can write."""
    values = {a.name: _unreadable(a, node) for a in node.attribute if not a.ref_attr_name}
    taken = {name: deepcopy(value) for name, value in values.items() if value is not None}
    for i in reversed(range(len(node.attribute) if taken else 0)):
        if node.attribute[i].name in taken:
            del node.attribute[i]
    return taken


def _unreadable(attribute: AttributeProto, node: NodeProto) -> Any:
    """Returns the value of an attribute that graphsurgeon skips or rejects; None for any other
    attribute."""
    if attribute.type == AttributeProto.GRAPHS:
        raise ModelError(
            f"{node.op_type} '{node.name}': attribute {attribute.name!r} is a list of graphs, "
            "which no op of ONNX or onnxruntime has; make each graph an attribute of its own"
        )
    if attribute.type in _SKIPPED:
        value = getattr(attribute, _SKIPPED[attribute.type])
        return value if isinstance(value, (TypeProto, onnx.SparseTensorProto)) else list(value)
    if attribute.type in _LISTS and not getattr(attribute, _LISTS[attribute.type]):
        empty = _EmptyList()
        empty.kind = attribute.type
        return empty
    if attribute.type == AttributeProto.STRING and not _is_text(attribute.s):
        return attribute.s
    if not all(map(_is_text, attribute.strings)):
        return list(attribute.strings)
    return None


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _take_empty(node: gs.Node) -> dict[str, _EmptyList]:
    empty = {k: v for k, v in node.attrs.items() if isinstance(v, _EmptyList)}
    for name in empty:
        del node.attrs[name]
    return empty


def _read_constant_outputs(graph: gs.Graph) -> None:
    """Where a graph output is a constant, puts an Identity between the two, so that each may have
    its own layout."""
    names = {t.name for t in graph.outputs} | graph.tensors().keys()
    for i, constant in enumerate(graph.outputs):
        if not isinstance(constant, gs.Constant):
            continue
        shape = None if constant.dtype == object else constant.shape
        output = gs.Variable(constant.name, constant.dtype, shape)
        output.onnx_source = _source(constant)
        while constant.name in names:
            constant.name += ".value"
        names.add(constant.name)
        graph.outputs[i] = output
        node = gs.Node("Identity", f"Identity_{output.name}", {}, [constant], [output])
        graph.nodes.append(node)


def _describe(message: Any, source: Any) -> None:
    """Copies docs and metadata to the proto `message` from `source`, the proto from which its
    object was imported."""
    if source is None:
        return
    message.doc_string = source.doc_string
    del message.metadata_props[:]
    message.metadata_props.extend(source.metadata_props)


def _describe_graph(graph: gs.Graph, proto: GraphProto) -> None:
    """Copies docs, metadata and declared types to the proto of an exported graph from the proto
    that it was imported from."""
    source = _source(graph)
    _describe(proto, source)
    if source is not None:
        proto.quantization_annotation.extend(source.quantization_annotation)
    tensors = (*graph.inputs, *graph.outputs)
    for tensor, port in zip(tensors, (*proto.input, *proto.output), strict=True):
        declared = _source(tensor)
        _describe(port, declared)
        if declared is None:
            continue
        if not _is_plain(declared.type):
            port.type.CopyFrom(declared.type)
        port.type.denotation = declared.type.denotation
        dims = declared.type.tensor_type.shape.dim
        for dim, own in zip(port.type.tensor_type.shape.dim, dims, strict=False):
            dim.denotation = own.denotation
    del proto.value_info[:]


def _hoist(graph: gs.Graph, proto: GraphProto) -> list[TensorProto]:
    """Removes constants that subgraphs capture from the subgraphs' protos, where graphsurgeon's
    exporter repeats them; returns the constants that the outer graph's proto lacks."""
    have = {t.name for t in proto.initializer}
    missing: dict[str, TensorProto] = {}
    inner_graphs = [g for n in graph.nodes for g in n.attrs.values() if isinstance(g, gs.Graph)]
    protos = [g for n in proto.node for g in subgraphs_of(n)]
    for inner, message in zip(inner_graphs, protos, strict=True):
        message.initializer.extend(_hoist(inner, message))
        own = {t.name for t in _source(inner).initializer} if _source(inner) else set()
        kept = [t for t in message.initializer if t.name in own]
        missing |= {t.name: t for t in message.initializer if t.name not in own | have}
        del message.initializer[:]
        message.initializer.extend(kept)
    return list(missing.values())
