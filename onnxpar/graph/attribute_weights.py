"""Makes weights that ops have in attributes (the trees of a forest, the vectors of an SVM)
operands, so that passes split, count and plan them like any others.

Graphs in memory have one more constant operand for them, with a row per tree or vector. It has no
data: the rule of the op cuts the attributes for the rows that a rank holds. Models in files do not
have the operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import all_nodes

ML = "ai.onnx.ml"
AT = 1
"""The position of this additional operand."""

_NAMES = {
    "TreeEnsemble": "trees",
    "TreeEnsembleRegressor": "trees",
    "TreeEnsembleClassifier": "trees",
    "SVMRegressor": "vectors",
    "SVMClassifier": "vectors",
}
"""The name for the rows of the operand, by op of ai.onnx.ml."""


def has_attribute_weights(node: gs.Node) -> bool:
    """True if the node has the additional operand for weights in its attributes."""
    return node.domain == ML and node.op in _NAMES and len(node.inputs) > AT


def expose(graph: gs.Graph) -> None:
    """Adds the operand to each node of the graph that has at least two trees or vectors in its
    attributes."""
    taken = graph.tensors().keys()
    for node in all_nodes(graph):
        if node.domain != ML or node.op not in _NAMES or len(node.inputs) != AT:
            continue
        count = _count(node)
        if count < 2:
            continue
        name = f"{node.name}.{_NAMES[node.op]}"
        while name in taken:
            name += "_"
        row = -(-sum(map(_bytes, node.attrs.values())) // count)
        node.inputs.append(gs.Constant(name, np.broadcast_to(np.uint8(0), (count, row))))


def attribute_weights(graph: gs.Graph) -> frozenset[str]:
    """Returns the names of all such operands in a graph. They have no data, so they cannot be
    resharded."""
    nodes = filter(has_attribute_weights, all_nodes(graph))
    return frozenset(node.inputs[AT].name for node in nodes)


def conceal(nodes: Iterable[gs.Node]) -> None:
    """Removes the operand from the nodes that have it, as before writing a file."""
    for node in nodes:
        if has_attribute_weights(node):
            node.inputs.pop()


def numbers(value: Any) -> np.ndarray[Any, Any]:
    """Returns an attribute that is a list of numbers or a tensor as an array."""
    return np.asarray(value.values if isinstance(value, gs.Tensor) else value)


def tree_starts(node: gs.Node) -> np.ndarray[Any, Any]:
    """Returns where each tree starts in the attributes of a TreeEnsembleRegressor or -Classifier:
    the index of its first node."""
    trees = np.asarray(node.attrs.get("nodes_treeids", ()), np.int64)
    return np.flatnonzero(np.r_[True, trees[1:] != trees[:-1]]) if len(trees) else trees


def _count(node: gs.Node) -> int:
    """Returns the number of trees or vectors in a node's attributes; 0 if they cannot be cut by
    tree or vector."""
    if node.op == "TreeEnsemble":
        return len(numbers(node.attrs.get("tree_roots", ())))
    if node.op == "SVMRegressor":
        return int(node.attrs.get("n_supports", 0))
    if node.op == "SVMClassifier":
        return int(np.sum(node.attrs.get("vectors_per_class", ())))
    starts = tree_starts(node)
    named = {node.attrs["nodes_treeids"][i] for i in starts}
    return len(starts) if len(named) == len(starts) else 0


def _bytes(value: Any) -> int:
    """Bytes of an attribute in memory."""
    if isinstance(value, gs.Tensor):
        return int(np.prod(value.shape) * np.dtype(value.dtype).itemsize)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return (4 if len(value) and isinstance(value[0], float) else 8) * len(value)
    return 0
