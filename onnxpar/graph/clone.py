"""Copies nodes, and finds the nodes that some outputs need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import read_by


def clone_nodes(
    nodes: Iterable[gs.Node], prefix: str = "", instead: Mapping[int, gs.Tensor] | None = None
) -> tuple[list[gs.Node], dict[int, gs.Tensor]]:
    """Returns copies of nodes, and the copy of each tensor by id() of the original. Names of copies
    start with `prefix`. A copied node reads copies where the original reads results of other copied
    nodes; else it reads the original's operands.

    instead  tensors to read in place of operands, by id() of the operand
    """
    copies: dict[int, gs.Tensor] = dict(instead or {})
    return [clone_node(node, prefix, copies) for node in nodes], copies


def clone_node(node: gs.Node, prefix: str, copies: dict[int, gs.Tensor]) -> gs.Node:
    """Returns a copy of a node. It reads the tensors in `copies` (by id() of the original) in place
    of operands; copies of its results are added to `copies`."""
    inputs = [copies.get(id(t), t) for t in node.inputs]
    attrs = {key: _attribute(value, prefix, copies) for key, value in node.attrs.items()}
    outputs = [_tensor(t, prefix, copies) for t in node.outputs]
    copy = gs.Node(node.op, prefix + node.name, attrs, inputs, outputs, node.domain)
    copy.onnx_source = vars(node).get("onnx_source")
    return copy


def _attribute(value: Any, prefix: str, copies: dict[int, gs.Tensor]) -> Any:
    if not isinstance(value, gs.Graph):
        return value
    inputs = [_tensor(t, prefix, copies) for t in value.inputs]
    nodes = [clone_node(node, prefix, copies) for node in value.nodes]
    outputs = [copies.get(id(t), t) for t in value.outputs]
    copy = gs.Graph(
        nodes,
        inputs,
        outputs,
        value.name,
        opset=value.opset,
        import_domains=value.import_domains,
        ir_version=value.ir_version,
    )
    return copy


def _tensor(tensor: gs.Tensor, prefix: str, copies: dict[int, gs.Tensor]) -> gs.Tensor:
    if not tensor.name:
        return gs.Variable.empty()
    copy = gs.Variable(prefix + tensor.name, tensor.dtype, tensor.shape)
    copies[id(tensor)] = copy
    return copy


def needed(graph: gs.Graph, outputs: Collection[str], known: Collection[str] = ()) -> list[gs.Node]:
    """Returns the nodes that compute the tensors `outputs` from the tensors `known` and the graph's
    inputs, in order."""
    wanted = set(outputs)
    nodes = []
    for node in reversed(graph.nodes):
        if any(t.name in wanted for t in node.outputs if t.name):
            wanted |= {t.name for t in read_by(node)}
            wanted -= set(known)
            nodes.append(node)
    return nodes[::-1]


def nodes_of_run(graph: gs.Graph, apart: Collection[str]) -> list[gs.Node]:
    """Returns the nodes that an ordinary run computes, in order: all except nodes for the outputs
    `apart` alone, which another program of the ranks computes."""
    outputs = [t.name for t in graph.outputs]
    kept = [name for name in outputs if name not in apart]
    return list(graph.nodes) if len(kept) == len(outputs) else needed(graph, kept)
