"""Orders nodes and reshards. A reshard that shrinks a tensor runs as early as possible, one that
enlarges a tensor as late as possible."""

from __future__ import annotations

import heapq

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import KINDS
from onnxpar.graph.reshards import is_reshard
from onnxpar.graph.subgraphs import read_by, scopes

_LATE = tuple(kind.name for kind in KINDS.values() if kind.is_late)


def schedule(graph: gs.Graph) -> None:
    """Sorts the nodes of a graph and of its bodies topologically, in place.

    Nodes of the model keep their order. A reshard moves right after the node that computes its
    operand; a gather moves right before its first reader. So gathered parameters are allocated
    late, and reductions start long before the end of the graph.
    """
    for scope in list(scopes(graph)):
        _Schedule(scope).run()


class _Schedule:
    """Sorts the nodes of one graph."""

    def __init__(self, graph: gs.Graph) -> None:
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.makers = {id(t): node for node in self.nodes for t in node.outputs if t.name}
        self.reads = {id(node): read_by(node) for node in self.nodes}
        self.readers: dict[int, list[gs.Node]] = {}
        for node in self.nodes:
            for tensor in self.reads[id(node)]:
                self.readers.setdefault(id(tensor), []).append(node)
        self.index = {id(node): i for i, node in enumerate(self.nodes) if not is_reshard(node)}
        self.keys: dict[int, tuple[float, int]] = {}

    def run(self) -> None:
        """Sorts the nodes; among ready nodes, the node with the lowest key comes first."""
        missing = {
            id(node): {id(m) for t in self.reads[id(node)] if (m := self.makers.get(id(t)))}
            for node in self.nodes
        }
        ready = [
            (*self._key(node), i, node)
            for i, node in enumerate(self.nodes)
            if not missing[id(node)]
        ]
        heapq.heapify(ready)
        numbers = {id(node): i for i, node in enumerate(self.nodes)}
        self.graph.nodes.clear()
        while ready:
            node = heapq.heappop(ready)[-1]
            self.graph.nodes.append(node)
            for reader in self._readers(node):
                waits = missing[id(reader)]
                if id(node) in waits:
                    waits.discard(id(node))
                    if not waits:
                        entry = (*self._key(reader), numbers[id(reader)], reader)
                        heapq.heappush(ready, entry)
        assert len(self.graph.nodes) == len(self.nodes), "nodes wait for each other"

    def _readers(self, node: gs.Node) -> list[gs.Node]:
        return [n for t in node.outputs for n in self.readers.get(id(t), ())]

    def _key(self, node: gs.Node) -> tuple[float, int]:
        """Returns the sort key of a node. Model nodes: their position among model nodes. Gathers:
        right before the first reader. Other reshards: right after the last model node on which they
        depend."""
        if id(node) in self.index:
            return self.index[id(node)], 1
        if id(node) not in self.keys:
            readers = self._readers(node) if node.op in _LATE else []
            places = [self._key(n)[0] if n.op in _LATE else self._earliest(n) for n in readers]
            key = (min(places), 0) if places else (self._earliest(node), 2)
            self.keys[id(node)] = key
        return self.keys[id(node)]

    def _earliest(self, node: gs.Node) -> float:
        """Returns the position of a model node; for a reshard, that of the last model node on which
        the reshard depends."""
        if id(node) in self.index:
            return self.index[id(node)]
        return max((self._earliest(maker) for maker in self._makers(node)), default=-1.0)

    def _makers(self, node: gs.Node) -> list[gs.Node]:
        makers = [self.makers.get(id(t)) for t in self.reads[id(node)]]
        return [maker for maker in makers if maker is not None]
