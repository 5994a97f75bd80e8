"""The order of nodes once reshards stand among them: what shrinks a tensor as early as it can, what
makes it larger as late."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.collective import DOMAIN
from onnxpar.subgraphs import captured, scopes

_GROWS = ("AllGather", "Broadcast")


def schedule(graph: gs.Graph) -> None:
    """Sorts the nodes of a graph and of its bodies topologically, in place.

    Nodes of the model keep their order. Reshards, wherever they were put, stand right behind what
    they read, or right before their first reader where they gather: a gathered parameter lives no
    longer than it is needed, and a sum over ranks is not waited for at the end.
    """
    for scope in list(scopes(graph)):
        _Schedule(scope).run()


class _Schedule:
    def __init__(self, graph: gs.Graph) -> None:
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.makers = {id(t): node for node in self.nodes for t in node.outputs if t.name}
        self.reads = {id(node): _read(node) for node in self.nodes}
        self.done: set[int] = set()
        self.early: dict[int, list[gs.Node]] = {}
        for node in self.nodes:
            if node.domain == DOMAIN and node.op not in _GROWS:
                for tensor in self.reads[id(node)]:
                    self.early.setdefault(id(tensor), []).append(node)

    def run(self) -> None:
        """Puts the nodes of the model in their places, and with them all others."""
        self.graph.nodes.clear()
        for node in self.nodes:
            if node.domain != DOMAIN:
                self._place(node)
        for node in self.nodes:
            self._place(node)

    def _place(self, node: gs.Node) -> None:
        """Puts a node behind all that it needs, and behind it what should follow at once."""
        stack = [node]
        while stack:
            top = stack[-1]
            if id(top) in self.done:
                stack.pop()
                continue
            needed = [m for t in self.reads[id(top)] if (m := self._missing(t)) is not None]
            if needed:
                stack += reversed(needed)
                continue
            stack.pop()
            self.done.add(id(top))
            self.graph.nodes.append(top)
            following = [n for t in top.outputs for n in self.early.get(id(t), ())]
            stack += [n for n in reversed(following) if self._is_ready(n)]

    def _missing(self, tensor: gs.Tensor) -> gs.Node | None:
        """The node of this graph that makes a tensor and has no place yet."""
        maker = self.makers.get(id(tensor))
        return None if maker is None or id(maker) in self.done else maker

    def _is_ready(self, node: gs.Node) -> bool:
        return all(self._missing(t) is None for t in self.reads[id(node)])


def _read(node: gs.Node) -> list[gs.Tensor]:
    """The operands of a node, and what its subgraphs read of the graph."""
    return [*node.inputs, *(tensor for tensor, _, _ in captured(node))]
