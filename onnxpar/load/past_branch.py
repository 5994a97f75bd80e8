"""Replaces a merged decoder by its branch with caches.

Optimum merges a decoder without caches and one with them into one file: an If whose condition, the
input `use_cache_branch`, says which one runs. With empty caches, the decoder with caches computes
what the other one would.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import GraphProto

from onnxpar.graph.branches import branch_of, put_branch


def take_past_branch(model: onnx.ModelProto) -> None:
    """Replaces an If that is the whole graph, and whose condition is an input, by the branch that
    reads more inputs, in place. Does nothing for any other graph."""
    graph = model.graph
    inputs = {i.name for i in graph.input}
    if (
        len(graph.node) != 1
        or graph.node[0].op_type != "If"
        or graph.node[0].input[0] not in inputs
    ):
        return
    (node,) = graph.node
    condition = node.input[0]
    branches = {a.name: a.g for a in node.attribute}
    past = max(branches, key=lambda name: len(_read(branches[name], inputs)))
    branch = branch_of(node, past == "then_branch", inputs | {w.name for w in graph.initializer})
    if branch is None:
        return  # a tensor of the branch hides one around it
    put_branch(graph, node, branch)
    kept = [i for i in graph.input if i.name != condition]
    del graph.input[:]
    graph.input.extend(kept)


def _read(body: GraphProto, names: Collection[str]) -> set[str]:
    """Returns the names in `names` that nodes of a branch read."""
    return {name for node in body.node for name in node.input} & set(names)
