"""Replaces an If node by one of its branches, where the condition is known."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto


def taken_branch(
    node: NodeProto, values: Mapping[str, np.ndarray[Any, Any]], names: Collection[str]
) -> GraphProto | None:
    """Returns a copy of the branch that an If always takes, with Identity nodes that copy the
    branch's results to the names of the If's results. None if the node is not an If, if its
    condition is not known, or if a tensor of the branch has a name that is in use outside.

    values  known tensors, by name
    names   all names in use in the graph
    """
    if node.op_type != "If" or node.domain not in ("", "ai.onnx") or node.input[0] not in values:
        return None
    condition = bool(values[node.input[0]].reshape(-1)[0])
    branch = branch_of(node, condition, names)
    return None if branch is None or branch.sparse_initializer else branch


def branch_of(node: NodeProto, condition: bool, names: Collection[str]) -> GraphProto | None:
    """Returns a copy of the branch for this condition, with Identity nodes that copy its results to
    the names of the If's results. None if a tensor of the branch has one of `names`, the names in
    use outside."""
    name = "then_branch" if condition else "else_branch"
    branch = GraphProto()
    branch.CopyFrom(next(a.g for a in node.attribute if a.name == name))
    names_within = [t.name for t in branch.initializer]
    names_within += [output for inner in branch.node for output in inner.output]
    if any(name in names for name in names_within):
        return None
    for source, result in zip(branch.output, node.output, strict=False):
        if result and result != source.name:
            branch.node.append(onnx.helper.make_node("Identity", [source.name], [result]))
    return branch


def put_branch(graph: GraphProto, node: NodeProto, branch: GraphProto) -> None:
    """Replaces an If node of a graph by the nodes and weights of a branch, in place."""
    at = next(i for i, each in enumerate(graph.node) if each is node)
    nodes = [*graph.node[:at], *branch.node, *graph.node[at + 1 :]]
    graph.initializer.extend(branch.initializer)
    graph.sparse_initializer.extend(branch.sparse_initializer)
    del graph.node[:]
    graph.node.extend(nodes)
