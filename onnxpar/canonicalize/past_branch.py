"""Takes the branch with past out of a merged decoder.

Optimum merges a decoder without caches and one with them into one file: an If whose condition, the
input `use_cache_branch`, says which one runs. With empty caches, the one with past computes the
same.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import GraphProto, NodeProto, helper


def take_past_branch(model: onnx.ModelProto) -> None:
    """Puts the branch that reads most inputs in place of an If that is the whole graph and whose
    condition is an input, in place."""
    graph = model.graph
    inputs = {i.name for i in graph.input}
    if (
        len(graph.node) != 1
        or graph.node[0].op_type != "If"
        or graph.node[0].input[0] not in inputs
    ):
        return
    node = NodeProto()
    node.CopyFrom(graph.node[0])
    branches = [a.g for a in node.attribute]
    branch = max(branches, key=lambda body: len(_read(body, inputs)))
    taken = {w.name for w in graph.initializer} | inputs
    made = {name for inner in branch.node for name in inner.output}
    if not taken.isdisjoint(made | {w.name for w in branch.initializer}):
        return  # a tensor of the branch hides one around it
    del graph.node[:]
    graph.node.extend(branch.node)
    graph.initializer.extend(branch.initializer)
    graph.sparse_initializer.extend(branch.sparse_initializer)
    for source, result in zip(branch.output, node.output, strict=True):
        if source.name != result:
            graph.node.append(helper.make_node("Identity", [source.name], [result], result))
    kept = [i for i in graph.input if i.name != node.input[0]]
    del graph.input[:]
    graph.input.extend(kept)


def _read(body: GraphProto, names: Collection[str]) -> set[str]:
    """The tensors with these names that a branch reads."""
    return {name for node in body.node for name in node.input} & set(names)
