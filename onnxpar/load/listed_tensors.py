"""Replaces a list of tensors by the tensors where a node joins them, or picks one: unlike
a sequence, they have layouts and gradients."""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from onnxpar.graph.stored import graphs_of, is_folded, onnx_opset, stored_tensors

_AXES_BY_OPERAND = 13
"""The opset since which an operand of Unsqueeze gives the axes."""


def read_listed(model: ModelProto) -> None:
    """Makes each ConcatFromSequence, and each SequenceAt at a constant position, of a
    SequenceConstruct read its tensors, in place."""
    if onnx_opset(model) < _AXES_BY_OPERAND:
        return
    graphs = list(graphs_of(model.graph))
    own = [n for g in graphs for n in g.node if n.op_type == "SequenceConstruct" and not n.domain]
    lists = {n.output[0]: list(n.input) for n in own}
    places = {
        t.name: numpy_helper.to_array(t)
        for t in (stored_tensors(model.graph) if lists else ())
        if is_folded(t) and not t.dims
    }
    for graph in graphs:
        nodes = []
        for node in graph.node:
            listed = lists.get(node.input[0], []) if node.input else []
            if node.op_type == "ConcatFromSequence" and listed:
                nodes += _joined(graph, node, listed)
            elif node.op_type == "SequenceAt" and listed and node.input[1] in places:
                nodes.append(_picked(node, listed, int(places[node.input[1]])))
            else:
                nodes.append(node)
        if lists:
            del graph.node[:]
            graph.node.extend(nodes)


def _joined(graph: GraphProto, node: NodeProto, tensors: list[str]) -> list[NodeProto]:
    """A Concat of tensors in place of that of a list, with a new axis if the node makes one."""
    attrs = {a.name: a.i for a in node.attribute}
    result, axis = node.output[0], attrs["axis"]
    nodes = []
    if attrs.get("new_axis"):
        graph.initializer.append(numpy_helper.from_array(np.array([axis]), f"{result}::axis"))
        own = [f"{result}::{i}" for i in range(len(tensors))]
        for name, tensor in zip(own, tensors, strict=True):
            nodes.append(helper.make_node("Unsqueeze", [tensor, f"{result}::axis"], [name]))
        tensors = own
    return [*nodes, helper.make_node("Concat", tensors, [result], node.name, axis=axis)]


def _picked(node: NodeProto, tensors: list[str], place: int) -> NodeProto:
    """An Identity of the tensor at a place; the node itself if there is no such place."""
    if not -len(tensors) <= place < len(tensors):
        return node
    return helper.make_node("Identity", [tensors[place]], node.output, node.name)
