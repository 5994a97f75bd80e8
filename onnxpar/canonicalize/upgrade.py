"""Converts models of opsets 7 to 9 to opset 10, node by node; all else in the model stays as it is.

onnx.version_converter drops metadata, and relabels Scan-8 as Scan-9, which has another meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx
import onnx.version_converter
from onnx import GraphProto, NodeProto, TensorProto, helper

from onnxpar.errors import ModelError
from onnxpar.ir.stored import copy_with_stubs, is_folded, subgraphs_of

OLDEST, NEWEST = 7, 10
Fresh = Callable[[str], str]


def upgrade(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    """The model with ONNX's own domain at opset 10 or newer. The given model may be changed in
    place; `what` names it in messages.

    Errors: ModelError that names a node without an equivalent in opset 10.
    """
    if all(o.domain not in ("", "ai.onnx") for o in model.opset_import):
        model.opset_import.add(domain="", version=NEWEST)
    model = _from_oldest(model, what)
    imports = [o for o in model.opset_import if o.domain in ("", "ai.onnx")]
    opset = imports[0].version
    if opset >= NEWEST:
        return model
    taken = set(_names(model.graph))

    def fresh(name: str) -> str:
        i = next(i for i in range(len(taken) + 1) if f"{name}.{i}" not in taken)
        taken.add(f"{name}.{i}")
        return f"{name}.{i}"

    _upgrade_graph(model.graph, opset, fresh, what, _read(model.graph))
    for entry in imports:
        entry.version = NEWEST
    return model


def raise_opset(model: onnx.ModelProto, opset: int, what: str) -> onnx.ModelProto:
    """The model with ONNX's own domain at this opset or newer, by ONNX's converter, which drops
    metadata. Large tensors do not go through the converter. Errors: ModelError."""
    have = min(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    if have >= opset:
        return model
    large = [t for t in model.graph.initializer if not is_folded(t)]
    bare = onnx.ModelProto()
    bare.CopyFrom(copy_with_stubs(model, lambda t: None if is_folded(t) else TensorProto()))
    kept = [t for t in bare.graph.initializer if t.name]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    for tensor in large:
        type_ = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        bare.graph.input.append(helper.make_value_info(tensor.name, type_))
    converted = _convert(bare, have, opset, what)
    names = {tensor.name for tensor in large}
    inputs = [p for p in converted.graph.input if p.name not in names]
    del converted.graph.input[:]
    converted.graph.input.extend(inputs)
    converted.graph.initializer.extend(large)
    return converted


def _from_oldest(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    """The model at opset 7 or newer: converts opsets 1 to 6 with ONNX's converter. That drops
    metadata, which models of that age do not have."""
    opset = min(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    if opset >= OLDEST:
        return model
    return _convert(model, opset, OLDEST, what)


def _convert(model: onnx.ModelProto, have: int, opset: int, what: str) -> onnx.ModelProto:
    try:
        return onnx.version_converter.convert_version(model, opset)
    except (
        RuntimeError,
        onnx.version_converter.ConvertError,
        onnx.shape_inference.InferenceError,
    ) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"{what}: cannot convert opset {have} to {opset}: {reason}; export the model with "
            f"opset {max(opset, NEWEST)} or newer"
        ) from None


def _names(graph: GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield from node.input
        yield from node.output
        for inner in subgraphs_of(node):
            yield from _names(inner)
    yield from (p.name for p in [*graph.input, *graph.output, *graph.initializer])


def _read(graph: GraphProto) -> set[str]:
    """All names that nodes or outputs read, at any depth."""
    names = {o.name for o in graph.output} | {n for node in graph.node for n in node.input}
    return names.union(*(_read(inner) for node in graph.node for inner in subgraphs_of(node)))


def _upgrade_graph(graph: GraphProto, opset: int, fresh: Fresh, what: str, read: set[str]) -> None:
    nodes: list[NodeProto] = []
    for node in graph.node:
        for inner in subgraphs_of(node):
            _upgrade_graph(inner, opset, fresh, what, read)
        reason = _obstacle(node, opset, read) if node.domain in ("", "ai.onnx") else ""
        if reason:
            name = node.name or (node.output[0] if node.output else "")
            raise ModelError(
                f"{what}: {node.op_type} '{name}' of opset {opset} has no equivalent in opset "
                f"{NEWEST}: {reason}; export the model with opset {NEWEST} or newer"
            )
        if node.domain in ("", "ai.onnx"):
            nodes += _restate(node, opset, fresh)
        nodes.append(node)
    kept = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _obstacle(node: NodeProto, opset: int, read: set[str]) -> str:
    """The reason why a node cannot be converted; empty if it can be."""
    attributes = {a.name: a for a in node.attribute}
    if node.op_type == "Scan" and opset == 8:
        return "it scans a batch of sequences of different lengths"
    if node.op_type == "BatchNormalization" and opset < 9:
        spatial = attributes.get("spatial")
        return "spatial=0" if spatial is not None and spatial.i == 0 else ""
    if node.op_type == "Dropout" and len(node.output) > 1 and node.output[1] in read:
        return f"a node reads its mask, which is not a bool before opset {NEWEST}"
    return ""


def _restate(node: NodeProto, opset: int, fresh: Fresh) -> list[NodeProto]:
    """Converts a node in place; returns the constants that it now reads.

    All other ops that changed since opset 7 only gained types or optional attributes.
    """
    if node.op_type == "BatchNormalization":
        _take(node, "spatial")
    if node.op_type == "Dropout":
        del node.output[1:]
    if node.op_type == "Slice":
        starts = list(_take(node, "starts").ints)
        axes = _take(node, "axes")
        given = [starts, list(_take(node, "ends").ints)]
        return _add_inputs(node, [*given, list(axes.ints) or list(range(len(starts)))], fresh)
    if node.op_type == "TopK":
        return _add_inputs(node, [[_take(node, "k").i]], fresh)
    if node.op_type == "Upsample":
        node.op_type = "Resize"
        if opset < 9:
            return _add_inputs(node, [list(_take(node, "scales").floats)], fresh)
    return []


def _take(node: NodeProto, name: str) -> onnx.AttributeProto:
    """Removes and returns an attribute; returns an empty one if the node does not have it."""
    for i, attribute in enumerate(node.attribute):
        if attribute.name == name:
            found = onnx.AttributeProto()
            found.CopyFrom(attribute)
            del node.attribute[i]
            return found
    return onnx.AttributeProto()


def _add_inputs(
    node: NodeProto, values: list[list[int]] | list[list[float]], fresh: Fresh
) -> list[NodeProto]:
    constants = []
    for value in values:
        key = "value_floats" if value and isinstance(value[0], float) else "value_ints"
        name = fresh(f"{node.output[0]}.{len(node.input)}")
        tensor = helper.make_tensor(
            name,
            onnx.TensorProto.FLOAT if key == "value_floats" else onnx.TensorProto.INT64,
            [len(value)],
            value,
        )
        constants.append(helper.make_node("Constant", [], [name], value=tensor))
        node.input.append(name)
    return constants
