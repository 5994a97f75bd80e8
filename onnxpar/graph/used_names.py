"""All names in use in a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_graphsurgeon as gs
from onnx import GraphProto

from onnxpar.base.errors import ModelError
from onnxpar.base.names import Names
from onnxpar.graph.stored import nodes_of
from onnxpar.graph.subgraphs import scopes, subgraphs


def names_of(graph: gs.Graph) -> Names:
    """Returns the names of all tensors and nodes of a graph and its bodies."""
    nodes = (node.name for scope in scopes(graph) for node in scope.nodes)
    return Names([*(tensor.name for tensor in _tensors(graph)), *nodes])


def names_in(graph: GraphProto) -> Names:
    """Returns the names of all tensors and nodes of a graph proto and its subgraphs."""
    nodes = list(nodes_of(graph))
    ports = (*graph.input, *graph.output, *graph.initializer)
    read = (name for node in nodes for name in (node.name, *node.input, *node.output))
    return Names([*read, *(port.name for port in ports)])


def check_names(graph: gs.Graph, who: str) -> None:
    """Checks that no two tensors of a graph have one name, as files and layouts would confuse them;
    sibling bodies may have the same names. `who` is the culprit in errors: "pass NAME". Errors:
    ModelError."""
    _check_scope(graph, {}, who)


def _check_scope(graph: gs.Graph, outer: Mapping[str, gs.Tensor], who: str) -> None:
    seen = dict(outer)
    for tensor in _tensors_in(graph):
        if tensor.name and seen.setdefault(tensor.name, tensor) is not tensor:
            raise ModelError(
                f"tensor {tensor.name!r}: {who} adds another tensor of this name; rename the "
                "model's own"
            )
    for node in graph.nodes:
        for body in subgraphs(node):
            _check_scope(body, seen, who)


def _tensors(graph: gs.Graph) -> Iterator[gs.Tensor]:
    for scope in scopes(graph):
        yield from _tensors_in(scope)


def _tensors_in(scope: gs.Graph) -> Iterator[gs.Tensor]:
    yield from (*scope.inputs, *scope.outputs)
    for node in scope.nodes:
        yield from (*node.inputs, *node.outputs)
