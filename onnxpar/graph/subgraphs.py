"""Subgraphs of nodes and the tensors that they capture; random nodes; removal of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_graphsurgeon as gs

from onnxpar.graph.scopes import CONTROL

_RANDOM = frozenset(
    (
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
    )
)


def subgraphs(node: gs.Node) -> Iterator[gs.Graph]:
    """Yields the graphs among a node's attributes."""
    for value in node.attrs.values():
        for graph in value if isinstance(value, list) else [value]:
            if isinstance(graph, gs.Graph):
                yield graph


def bodies(node: gs.Node) -> list[gs.Graph]:
    """Returns the bodies of an If, Loop or Scan, sorted by attribute (an If has two); empty for
    other nodes."""
    if node.op not in CONTROL or node.domain not in (None, "", "ai.onnx"):
        return []
    return [node.attrs[key] for key in sorted(node.attrs) if isinstance(node.attrs[key], gs.Graph)]


def scopes(graph: gs.Graph) -> Iterator[gs.Graph]:
    """Yields the graph and all its subgraphs, at any depth, each before its own subgraphs."""
    yield graph
    for node in graph.nodes:
        for inner in subgraphs(node):
            yield from scopes(inner)


def all_nodes(graph: gs.Graph) -> Iterator[gs.Node]:
    """Yields all nodes of the graph and of its subgraphs."""
    return (node for scope in scopes(graph) for node in scope.nodes)


def nodes_within(nodes: Iterable[gs.Node]) -> Iterator[gs.Node]:
    """Yields these nodes, each followed by those of its subgraphs, at any depth."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from nodes_within(graph.nodes)


def constants(graph: gs.Graph) -> list[gs.Constant]:
    """Returns all constants that the graph and its subgraphs read, without duplicates."""
    tensors = [t for scope in scopes(graph) for t in scope.tensors().values()]
    return list({t.name: t for t in tensors if isinstance(t, gs.Constant)}.values())


def captured(node: gs.Node) -> Iterator[tuple[gs.Tensor, gs.Node | gs.Graph, int]]:
    """Yields (tensor, reader, position) for each read, in a node's subgraphs at any depth, of a
    tensor from outside. The reader is a node (position among its inputs) or a graph (position among
    its outputs)."""
    for graph in subgraphs(node):
        own = {t.name for t in graph.inputs} | {t.name for n in graph.nodes for t in n.outputs}
        reads = [(t, n, i) for n in graph.nodes for i, t in enumerate(n.inputs)]
        reads += [(t, graph, i) for i, t in enumerate(graph.outputs)]
        reads += [entry for n in graph.nodes for entry in captured(n)]
        yield from (entry for entry in reads if entry[0].name and entry[0].name not in own)


def is_random(node: gs.Node) -> bool:
    """True if two ranks that run the node may get different results: it, or a node in its
    subgraphs, draws random numbers without a seed."""
    if draws(node):
        return "seed" not in node.attrs
    return any(is_random(inner) for graph in subgraphs(node) for inner in graph.nodes)


def draws(node: gs.Node) -> bool:
    """True if the node itself draws random numbers, with or without a seed."""
    if node.op == "Dropout":
        training = node.inputs[2] if len(node.inputs) > 2 else None
        if isinstance(training, gs.Constant):
            return bool(training.values.any())
        return training is not None and bool(training.name)
    return node.op in _RANDOM


def replace_reads(old: gs.Tensor, new: gs.Tensor) -> None:
    """Makes all nodes that read `old` read `new` instead."""
    for node in list(old.outputs):
        for i, operand in enumerate(node.inputs):
            if operand is old:
                node.inputs[i] = new


def detach(node: gs.Node) -> None:
    """Removes all inputs from a node, and from the nodes of its subgraphs at any depth, so that
    their tensors have no such reader any more."""
    node.inputs.clear()
    for inner in [n for graph in subgraphs(node) for n in graph.nodes]:
        detach(inner)


def read_by(node: gs.Node) -> list[gs.Tensor]:
    """Returns the operands of a node, and the tensors that its subgraphs capture from outside."""
    return [*node.inputs, *(tensor for tensor, _, _ in captured(node))]


def drop_unread(graph: gs.Graph) -> None:
    """Removes nodes whose results nothing reads, and then nodes that only these read, and so on."""
    outputs = {id(t) for t in graph.outputs}
    todo, gone = list(graph.nodes), set()
    while todo:
        node = todo.pop()
        if id(node) in gone or any(t.outputs or id(t) in outputs for t in node.outputs):
            continue
        gone.add(id(node))
        todo += [maker for t in read_by(node) for maker in t.inputs]
        detach(node)
    if gone:
        graph.nodes[:] = [n for n in graph.nodes if id(n) not in gone]


def cut_off(node: gs.Node) -> None:
    """Removes a node's operands and results from it, and the node from theirs. graphsurgeon's
    `clear` would remove the first of several equal nodes from a tensor's readers, and programs may
    contain copies."""
    for tensors, field in ((node.inputs, "outputs"), (node.outputs, "inputs")):
        for tensor in tensors:
            others = [n for n in getattr(tensor, field) if n is not node]
            list.__setitem__(getattr(tensor, field), slice(None), others)
        list.clear(tensors)
