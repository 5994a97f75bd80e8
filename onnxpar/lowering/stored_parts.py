"""Stores the matrices of a rank's experts as separate tensors, instead of a stack.

onnxruntime packs the weight of a product when it loads a model, if the weight is a stored matrix;
the matrix that a node takes out of a stored stack would be packed in each run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from onnxpar.graph.stored import element_bits, external_location, graphs_of, nodes_of

_Stored = Mapping[str, TensorProto]


def store_parts(graph: GraphProto) -> None:
    """Replaces stored stacks by their elements, in place, also in subgraphs, if all readers of the
    stack take single elements with constant numbers. The nodes that took the elements are
    removed."""
    stored = {tensor.name: tensor for each in graphs_of(graph) for tensor in each.initializer}
    ports = {port.name for each in graphs_of(graph) for port in (*each.input, *each.output)}
    gone: dict[str, str] = {}
    for each in graphs_of(graph):
        readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in nodes_of(each):
            for name in node.input:
                readers[name].append(node)
        for i, stack in reversed([*enumerate(each.initializer)]):
            numbers = [_number(node, stack, stored) for node in readers[stack.name]]
            if not numbers or None in numbers:
                continue
            results = {node.output[0]: node.input[1] for node in readers[stack.name]}
            if ports & {stack.name, *results}:
                continue
            for name, number in zip(results, numbers, strict=True):
                each.initializer.append(_part(stack, name, number or 0))
            gone |= results
            del each.initializer[i]
    if gone:
        _drop(graph, gone)


def _drop(graph: GraphProto, results: Mapping[str, str]) -> None:
    """Removes the nodes with these results, and the initializers that only they read. `results` has
    the operand of each node, by its result."""
    for each in graphs_of(graph):
        for i, node in reversed([*enumerate(each.node)]):
            if any(name in results for name in node.output):
                del each.node[i]
    read = {name for node in nodes_of(graph) for name in node.input}
    unread = {*results.values()} - read - {port.name for port in graph.output}
    for each in graphs_of(graph):
        for i, tensor in reversed([*enumerate(each.initializer)]):
            if tensor.name in unread:
                del each.initializer[i]


def _number(node: NodeProto, stack: TensorProto, stored: _Stored) -> int | None:
    """Returns the number of the element that a Gather takes out of a stored stack of matrices or
    vectors. None if the node does anything else, or if the element does not begin at a byte."""
    if node.op_type != "Gather" or node.input[0] != stack.name or any(a.i for a in node.attribute):
        return None
    index = stored.get(node.input[1])
    if index is None or index.dims:
        return None
    number, bits = int(numpy_helper.to_array(index)), _bits(stack)
    return number if bits and bits % 8 == 0 and 0 <= number < stack.dims[0] else None


def _bits(stack: TensorProto) -> int:
    """Returns the number of bits of an element of a stack; 0 for strings."""
    return int(prod(stack.dims[1:])) * element_bits(stack.data_type)


def _part(stack: TensorProto, name: str, step: int) -> TensorProto:
    """Returns element `step` of a stack as a tensor called `name`; for a stack in a file, one that
    refers to its part of that file."""
    part = TensorProto(name=name, data_type=stack.data_type, dims=stack.dims[1:])
    size = _bits(stack) // 8
    if stack.data_location == TensorProto.EXTERNAL:
        location, offset, _ = external_location(stack)
        part.data_location = TensorProto.EXTERNAL
        for key, value in (
            ("location", location),
            ("offset", offset + step * size),
            ("length", size),
        ):
            part.external_data.add(key=key, value=str(value))
    elif stack.HasField("raw_data"):
        part.raw_data = stack.raw_data[step * size : (step + 1) * size]
    else:
        part.CopyFrom(numpy_helper.from_array(np.asarray(numpy_helper.to_array(stack)[step]), name))
    return part
