"""Replaces a node by other nodes, an input by a constant, a constant by an input; adds outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_graphsurgeon as gs
from onnx import TensorProto, numpy_helper

from onnxpar.graph.lazy_values import stored_proto
from onnxpar.graph.subgraphs import replace_reads, scopes
from onnxpar.training.gradients.value import Builder, Value


def replace_node(
    graph: gs.Graph,
    node: gs.Node,
    make: Callable[[Builder, Sequence[gs.Tensor]], Sequence[Value | None]],
) -> None:
    """Replaces a node of a graph, or of a body in it, by the nodes that `make` appends.

    make  takes a builder and the node's operands; returns a value for each of the node's results,
          or None for a result that no node reads
    """
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
    """Replaces a graph input by a constant with this value."""
    replace_reads(tensor, gs.Constant(tensor.name, gs.ir.tensor.LazyValues(value)))
    graph.inputs.remove(tensor)


def as_input(
    graph: gs.Graph, tensor: gs.Constant, shape: Sequence[int] | None = None
) -> gs.Variable:
    """Replaces a weight by a graph input whose default is the weight's value, and returns the
    input. Its shape is the weight's, or `shape` if the graph reads a shard of the weight."""
    if isinstance(tensor, gs.Variable):  # several nodes share it
        return tensor
    variable = gs.Variable(tensor.name, tensor.dtype, list(shape or tensor.shape))
    variable.onnx_default = stored_proto(tensor) or numpy_helper.from_array(
        tensor.values, tensor.name
    )
    replace_reads(tensor, variable)
    graph.inputs.append(variable)
    return variable


def add_output(graph: gs.Graph, value: Value, name: str) -> None:
    """Adds a value to the graph's outputs, with this name."""
    result = gs.Variable(name, value.dtype, list(value.shape))
    graph.nodes.append(gs.Node("Identity", f"output/{name}", {}, [value.tensor], [result]))
    graph.outputs.append(result)
