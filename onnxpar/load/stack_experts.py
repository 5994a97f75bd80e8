"""Rewrites mixtures of experts, in the forms that exporters write, such that the expert is a
dimension of the weights and of all tensors in between.

torch has no op for a mixture. Loops over experts are exported as one subgraph for each expert, and
Hugging Face's other forms gather a matrix for each token, or sort tokens by expert. In none of them
is the expert a dimension that can be split.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.lazy_values import StackedValues, stack_of
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.graph.used_names import names_of
from onnxpar.load.gathered_experts import gathered_mixtures
from onnxpar.load.scattered_experts import scattered_mixtures


def stack_experts(graph: gs.Graph, folder: Path, in_nodes: bool = False) -> None:
    """Rewrites each mixture of the graph whose experts compute the same steps, in place: 8 weights
    [64, 32] become one [8, 64, 32].

    folder    has the model's external data
    in_nodes  True to stack weights by nodes, so that weights keep their names and shapes, as
              training requires; False to store stacked weights
    """
    scattered_mixtures(graph, folder)
    gathered_mixtures(graph, folder)
    if in_nodes:
        _stack_in_nodes(graph)


def _stack_in_nodes(graph: gs.Graph) -> None:
    """Replaces each constant that stacks weights by nodes that stack them: Reshapes and a
    Concat."""
    stacks: dict[int, tuple[gs.Constant, StackedValues]] = {}
    for node in all_nodes(graph):
        for tensor in node.inputs:
            stack = stack_of(tensor) if isinstance(tensor, gs.Constant) else None
            if stack is not None:
                stacks[id(tensor)] = tensor, stack
    nodes: list[gs.Node] = []
    names = names_of(graph)
    for tensor, stack in stacks.values():
        row = [1, *tensor.shape[1:]]
        rows = []
        root = names.root(tensor.name, "/")
        for i, weight in enumerate(stack.weights):
            name = f"{root}/Reshape.{i}"
            shape = gs.Constant(f"{name}/shape", np.array(row, np.int64))
            rows.append(gs.Variable(name, tensor.dtype, row))
            nodes.append(gs.Node("Reshape", name, {}, [weight, shape], rows[-1:]))
        joined = gs.Variable(tensor.name, tensor.dtype, list(tensor.shape))
        nodes.append(gs.Node("Concat", f"{root}/Concat", {"axis": 0}, rows, [joined]))
        for node in list(tensor.outputs):
            for i, operand in enumerate(node.inputs):
                if operand is tensor:
                    node.inputs[i] = joined
    graph.nodes[:0] = nodes
