"""Keeps onnxruntime from turning a Gather by a Range that crosses zero into a Slice.

The Slice has the start and the end of the Range, and counts negative ones from the end of the
dimension: it takes nothing where `x[arange(n - 1, -1, -1)]` takes all rows in reverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, helper, numpy_helper

from onnxpar.graph.stored import graphs_of, nodes_of, stored_tensors

SLICING = ("GatherToSliceFusion",)
"""onnxruntime's optimizers that make a Slice of a Gather."""


def takes_ranges(model: onnx.ModelProto) -> bool:
    """True if a Gather of this model reads the result of a Range."""
    nodes = list(nodes_of(model.graph))
    ranges = {node.output[0] for node in _ranges(nodes)}
    return any(n.op_type == "Gather" and not ranges.isdisjoint(n.input[1:]) for n in nodes)


def _ranges(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yields the Range nodes that have all that their op requires."""
    for node in nodes:
        if node.op_type == "Range" and not node.domain and len(node.input) == 3 and node.output:
            yield node


def keep_ranges(graph: GraphProto) -> None:
    """Negates the indices of each such Gather twice, also in bodies."""
    nodes = list(nodes_of(graph))
    ranges = list(_ranges(nodes))
    bounds = {name for node in ranges for name in node.input}
    values = {t.name: t for t in stored_tensors(graph) if t.name in bounds and not t.external_data}
    known: dict[str, Any] = {name: numpy_helper.to_array(t) for name, t in values.items()}
    for node in nodes:
        if node.op_type == "Constant" and node.attribute and bounds.intersection(node.output):
            known[node.output[0]] = helper.get_attribute_value(node.attribute[0])
            if node.attribute[0].name == "value":
                known[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    odd = {node.output[0] for node in ranges if _crosses_zero(node, known)}
    for scope in graphs_of(graph) if odd else ():
        written: list[NodeProto] = []
        for node in scope.node:
            if node.op_type == "Gather" and odd.intersection(node.input[1:2]):
                written += _negated_twice(node)
            written.append(node)
        kept = [_copy(node) for node in written]
        del scope.node[:]
        scope.node.extend(kept)


def _crosses_zero(node: NodeProto, known: dict[str, Any]) -> bool:
    """True if the indices may be of both signs, as far as constants tell."""
    start, limit, step = (known.get(name) for name in node.input)
    if step is None:
        return False
    low = limit if np.ravel(step)[0] < 0 else start
    return low is not None and bool(np.ravel(low)[0] < 0)


def _negated_twice(gather: NodeProto) -> list[NodeProto]:
    """Nodes that negate the indices of a Gather twice, which then reads their result."""
    nodes = []
    for i in range(2):
        name = f"{gather.output[0]}/negated{i}"
        nodes.append(helper.make_node("Neg", [gather.input[1]], [name], name))
        gather.input[1] = name
    return nodes


def _copy(node: NodeProto) -> NodeProto:
    own = NodeProto()
    own.CopyFrom(node)
    return own
