"""Gives the nodes of a model unique names."""

from __future__ import annotations

import onnx

from onnxpar.base.names import Names
from onnxpar.graph.stored import nodes_of


def name_nodes(graph: onnx.GraphProto, names: Names) -> None:
    """Gives every node, also in subgraphs, a unique name, by default from its op and result.

    No name in the model (`names`) is the name of a node followed by `::`: such names are for the
    nodes that passes put in its place.
    """
    taken: set[str] = set()
    for node in nodes_of(graph):
        name = node.name or f"{node.op_type}_{next((o for o in node.output if o), '')}"
        name = names.root(name, "::")
        unique, i = name, 1
        while unique in taken:
            unique, i = f"{name}_{i}", i + 1
        node.name = unique
        taken.add(unique)
