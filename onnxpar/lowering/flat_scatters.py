"""Flattens a ScatterElements that adds rows to zeros: in one dimension it takes half the time.

    ScatterElements(zeros [v, d], Expand(at [n, 1]), rows [n, d])
    ScatterElements(zeros [v d], at * d + [0, 1, ... d - 1], rows [n d])

Only ranks' graphs have the second form, because a merged dimension cannot be split by columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from onnxpar.graph.origin import copy_origin
from onnxpar.graph.stored import reads_of


def flatten_scatters(graph: GraphProto) -> None:
    """Flattens, in place, each ScatterElements of a rank's graph that adds rows to a tensor of
    zeros, such as the gradient of a table. A negative index still counts from the end."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    nodes: list[NodeProto] = []
    replaced: set[str] = set()
    for node in graph.node:
        shape = _shape(node, makers, stored)
        nodes += [node] if shape is None else _flat(graph, node, makers, shape)
        replaced |= set() if shape is None else set(node.input[:2])
    read = {port.name for port in graph.output}.union(*map(reads_of, nodes))
    if replaced:
        unread = replaced - read
        remaining = [node for node in nodes if not unread.intersection(node.output)]
        del graph.node[:]
        graph.node.extend(remaining)


def _shape(
    node: NodeProto, makers: Mapping[str, NodeProto], stored: Mapping[str, TensorProto]
) -> Sequence[int] | None:
    """Returns the shape of the result of a node that adds whole rows to zeros; None for others."""
    if node.op_type != "ScatterElements" or node.domain:
        return None
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if attributes.get("reduction") != b"add" or attributes.get("axis", 0) != 0:
        return None
    zeros, wide = (makers.get(name) for name in node.input[:2])
    narrow = makers.get(wide.input[0]) if wide is not None else None
    chain = zip(
        (zeros, wide, narrow), ("ConstantOfShape", "Expand", "Reshape"), (0, 1, 1), strict=True
    )
    sizes = []
    for maker, op, operand in chain:
        tensor = stored.get(maker.input[operand]) if maker and maker.op_type == op else None
        if tensor is None:
            return None
        sizes.append(numpy_helper.to_array(tensor).tolist())
    whole, rows, at = sizes
    are_rows = whole[1:] == rows[1:] and at == [rows[0], *[1] * (len(rows) - 1)]
    return whole if are_rows and len(whole) > 1 and 0 not in (*whole, *rows) else None


def _flat(
    graph: GraphProto, node: NodeProto, makers: Mapping[str, NodeProto], shape: Sequence[int]
) -> list[NodeProto]:
    """Adds constants to the graph; returns the nodes that replace a ScatterElements of rows."""
    name, width = f"{node.name}::flat", math.prod(shape[1:])
    constants = {
        "size": [math.prod(shape)],
        "one": [-1, 1],
        "width": width,
        "columns": np.arange(width),
        "all": [-1],
        "shape": shape,
    }
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value, np.int64), f"{name}/{key}")
        for key, value in constants.items()
    )
    nodes: list[NodeProto] = []

    def add(op: str, *operands: str, **attributes: Any) -> str:
        """Adds a node, and returns its result."""
        nodes.append(helper.make_node(op, operands, [f"{name}.{len(nodes)}"], **attributes))
        nodes[-1].name = nodes[-1].output[0]
        return str(nodes[-1].output[0])

    zeros = add("ConstantOfShape", f"{name}/size")
    nodes[-1].attribute.extend(makers[node.input[0]].attribute)
    at = add("Cast", makers[node.input[1]].input[0], to=TensorProto.INT64)
    first = add("Mul", add("Reshape", at, f"{name}/one"), f"{name}/width")
    places = add("Reshape", add("Add", first, f"{name}/columns"), f"{name}/all")
    rows = add("Reshape", node.input[2], f"{name}/all")
    total = add("ScatterElements", zeros, places, rows, axis=0, reduction="add")
    nodes.append(helper.make_node("Reshape", [total, f"{name}/shape"], node.output, node.name))
    copy_origin(nodes, node)
    return nodes
