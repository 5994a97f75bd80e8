"""Finds the nodes of a rank's graph that each node of onnxruntime's optimized graph computes.

onnxruntime keeps the names of results when it fuses nodes. So a fused node computes all nodes
between its results and the nearest tensors that the optimized graph still has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from onnx import GraphProto, NodeProto

_BLOCKED = "_nchwc"
"""onnxruntime names a node that computes in its blocked memory format by its result and this
suffix."""


def nodes_in(graph: GraphProto) -> Iterator[NodeProto]:
    """Yields the nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes_in(inner)


class Fused:
    """A rank's graph, and the same graph after onnxruntime's optimization."""

    def __init__(self, graph: GraphProto, optimized: GraphProto) -> None:
        self._makers = {t: node for node in nodes_in(graph) for t in node.output if t}
        self._by_name = {node.name: node for node in nodes_in(graph)}
        self._left = [*nodes_in(optimized)]
        self._constants = {tensor.name for tensor in optimized.initializer}

    def members(self) -> dict[str, list[NodeProto]]:
        """Returns, for each optimized node by name, the nodes of the rank's graph that it computes,
        beginning with the node of its result. Nodes that onnxruntime folded to constants belong to
        none."""
        return {node.name: self._members(node) for node in self._left}

    def _members(self, node: NodeProto) -> list[NodeProto]:
        """Returns the nodes that one optimized node computes: from its results (or the results of
        the next node that has any) back to tensors that still exist."""
        results = self._results(node)
        reader = self._reader(node)
        while not results and reader is not None:
            results, reader = self._results(reader), self._reader(reader)
        members: dict[str, NodeProto] = {}
        wanted = list(results)
        while wanted:
            maker = self._makers[wanted.pop()]
            members[maker.output[0]] = maker
            wanted += [
                t
                for t in maker.input
                if t in self._makers
                and t not in self._frontier
                and self._makers[t].output[0] not in members
            ]
        return list(members.values())

    def _results(self, node: NodeProto) -> list[str]:
        """Returns the names of the tensors of the rank's graph that an optimized node computes,
        perhaps in a blocked memory format."""
        kept = self._by_name.get(node.name)
        names = [*node.output, node.name.removesuffix(_BLOCKED)]
        results = [name for name in names if name in self._makers]
        return results or [name for name in (kept.output if kept else ()) if name]

    def _reader(self, node: NodeProto) -> NodeProto | None:
        """Returns an optimized node that reads a result of this node; None if no node does."""
        return next((self._readers[t] for t in node.output if t in self._readers), None)

    @cached_property
    def _readers(self) -> Mapping[str, NodeProto]:
        """A reader of each tensor, among the optimized nodes."""
        return {t: node for node in self._left for t in node.input}

    @cached_property
    def _frontier(self) -> set[str]:
        """Names of the tensors of the rank's graph that still exist after optimization."""
        return self._constants.union(*map(self._results, self._left))
