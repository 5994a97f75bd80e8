"""Names the nodes of a model."""

from __future__ import annotations

import onnx

from onnxpar.base.names import Names
from onnxpar.ir.exported import module_path
from onnxpar.ir.metadata import note_file_name
from onnxpar.ir.stored import nodes_of


def name_nodes(graph: onnx.GraphProto, names: Names) -> None:
    """Gives every node, in subgraphs too, a unique name: the path of its module in torch and its
    op, where dynamo's exporter says them, as `/layers.0/fc/MatMul`; else the one that it has, or
    its op and result. None of `names`, those of the model, continues it with `::`, as the names of
    what passes put in its place do."""
    taken: set[str] = set()
    for node in nodes_of(graph):
        path = module_path(node)
        name = f"{path}/{node.op_type}" if path is not None else node.name
        name = name or f"{node.op_type}_{next((o for o in node.output if o), '')}"
        name = names.root(name, "::")
        unique, i = name, 1
        while unique in taken:
            unique, i = f"{name}_{i}", i + 1
        if path is not None:
            note_file_name(node)
        node.name = unique
        taken.add(unique)
