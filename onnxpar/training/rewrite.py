"""Replaces a node by other nodes, or a graph input by a constant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.graph.subgraphs import replace_reads, scopes
from onnxpar.training.gradients.value import Builder, Value


def replace_node(
    graph: gs.Graph,
    node: gs.Node,
    make: Callable[[Builder, Sequence[gs.Tensor]], Sequence[Value | None]],
) -> None:
    """Replaces a node of a graph, or of a body in it. `make` gets the node's operands, and must
    return a value for each of the node's results, or None for a result that no node reads."""
    scope = next(g for g in scopes(graph) if any(n is node for n in g.nodes))
    at = next(i for i, n in enumerate(scope.nodes) if n is node)
    count = len(scope.nodes)
    inputs, outputs = list(node.inputs), list(node.outputs)
    node.inputs.clear()
    node.outputs.clear()
    values = make(Builder(scope, f"{node.name}/instead"), inputs)
    for value, output in zip(values, outputs, strict=True):
        if value is not None and output.name:
            name = f"{node.name}/instead/{output.name}"
            scope.nodes.append(gs.Node("Identity", name, {}, [value.tensor], [output]))
    made = scope.nodes[count:]
    scope.nodes = [*scope.nodes[:at], *made, *scope.nodes[at + 1 : count]]


def as_constant(graph: gs.Graph, tensor: gs.Variable, value: TensorProto) -> None:
    """Replaces a graph input by a constant."""
    replace_reads(tensor, gs.Constant(tensor.name, gs.ir.tensor.LazyValues(value)))
    graph.inputs.remove(tensor)
