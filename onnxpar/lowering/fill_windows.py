"""Moves nodes beside a collective, where too little computes to hide the communication.

y = AllToAllV(x, n, m)             y = AllToAllV(x, n, m)
z = Scan(y, w)                     to     s = MatMul(x, v)
s = MatMul(x, v)                   z = Scan(y, w)

Here, a shared expert computes while tokens travel to the other experts. The window of a collective
is the part of the graph from its start to the first node that reads its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN, KINDS
from onnxpar.graph.subgraphs import bodies
from onnxpar.lowering.hold_back import AFTER_PRODUCTS, PRODUCTS
from onnxpar.lowering.overlap import VIEWS, Windows, is_collective
from onnxpar.lowering.streams import GroupsOf

_ALIKE = 8.0
"""Collectives within this ratio of durations form one class. Longer collectives choose nodes first:
a short one must not take the only product that could hide a long one."""


@dataclass(frozen=True)
class Filling:
    """Nodes that move beside a collective, to compute while it is under way.

    collective  the name of the collective
    nodes       the names of the nodes
    awaited     the tensor, computed by them, for which the collective's first reader must wait,
                too: otherwise onnxruntime would run the reader first
    earlier     True if the nodes move from before the collective to right after it; False if they
                move from behind the first reader to right before it
    """

    collective: str
    nodes: tuple[str, ...]
    awaited: str
    earlier: bool


def find_fillings(
    graph: gs.Graph,
    heavy: Collection[str],
    groups: GroupsOf,
    seconds: Mapping[str, float],
    wanted: Mapping[str, float],
    least: Callable[[str], float],
) -> list[Filling]:
    """Moves nodes of a topologically sorted graph, which stays sorted; returns the moves.

    heavy          names of the nodes that compute
    groups         returns the groups of ranks of a collective
    seconds        the compute time of each node, by name
    wanted         seconds of compute that would hide each collective, by name
    least          seconds of compute below which starting a collective early does not pay

    Among collectives of similar duration, the last one takes earlier nodes first, and the first
    one takes later nodes first: the other collectives can still use the nodes that remain."""
    fillings: list[Filling] = []
    if len({node.name for node in graph.nodes}) < len(graph.nodes):
        return fillings  # names are ambiguous
    windows = Windows(graph, heavy, groups)
    names = [
        node.name
        for node in graph.nodes
        if node.name in wanted
        and wanted[node.name] > least(node.name)
        and not KINDS[node.op].is_late
    ]
    most = max((wanted[name] for name in names), default=0.0)

    def shortness(name: str) -> int:
        return int(math.log(most / wanted[name], _ALIKE))

    last_first = sorted(reversed(names), key=shortness)
    first_first = sorted(names, key=shortness)
    for earlier, name in [*((True, n) for n in last_first), *((False, n) for n in first_first)]:
        taken = {node for filling in fillings for node in filling.nodes}
        new = _Window(windows, name, seconds, taken).filling(wanted[name], least(name), earlier)
        if new is not None:
            fillings.append(new)
            _move(graph, windows, new)
            windows = Windows(graph, heavy, groups)
    return fillings


def fill(
    graph: gs.Graph, heavy: Collection[str], groups: GroupsOf, fillings: Iterable[Filling]
) -> None:
    """Repeats the moves of `fillings`, in order, in a graph with the same node names.

    heavy   names of the nodes that compute
    groups  returns the groups of ranks of a collective
    """
    for filling in fillings:
        _move(graph, Windows(graph, heavy, groups), filling)


def _move(graph: gs.Graph, windows: Windows, filling: Filling) -> None:
    """Moves the nodes of a filling in the graph."""
    by_name = {node.name: node for node in graph.nodes}
    node = by_name[filling.collective]
    beside = node if filling.earlier else windows.nodes[windows.reader(node)]
    moved = [by_name[name] for name in filling.nodes]
    moved_ids = {id(n) for n in moved}
    nodes = [n for n in graph.nodes if id(n) not in moved_ids]
    at = next(i for i, n in enumerate(nodes) if n is beside) + filling.earlier
    graph.nodes = [*nodes[:at], *moved, *nodes[at:]]


class _Window:
    """The window of the collective `name` (the nodes from its start to the first one that reads its
    result), and the search for nodes that could move there.

    seconds  the compute time of each node, by name
    taken    names of nodes that have moved already
    """

    def __init__(
        self, windows: Windows, name: str, seconds: Mapping[str, float], taken: Collection[str]
    ) -> None:
        self.windows, self.seconds, self.taken = windows, seconds, taken
        self.node = next(node for node in windows.nodes if node.name == name)
        self.at, self.end = windows.index[id(self.node)], windows.reader(self.node)

    def filling(self, wanted: float, least: float, earlier: bool) -> Filling | None:
        """Returns the nodes to move so that `wanted` seconds of compute run beside the collective,
        or as much as possible: from before the collective if `earlier`, else from behind the first
        node that reads its result. None if no node is to move, or if `least` seconds or less would
        still run there."""
        nodes = self.windows.nodes
        if self.end == len(nodes):
            return None
        lacking = wanted - self._work(nodes[self.at + 1 : self.end])
        if lacking <= 0.0:
            return None
        nodes_to_move = self._earlier(lacking) if earlier else self._later(lacking)
        ends = [node for node in nodes_to_move if self._may_be_awaited(node)]
        if not ends or wanted - lacking + self._work(nodes_to_move) <= least:
            return None
        names = tuple(node.name for node in nodes_to_move)
        return Filling(self.node.name, names, ends[-1].outputs[0].name, earlier)

    def _work(self, nodes: Iterable[gs.Node]) -> float:
        return sum(self.seconds.get(node.name, 0.0) for node in nodes)

    def _is_movable(self, node: gs.Node) -> bool:
        """True for a node that does not communicate, has no body, and has not moved already."""
        return node.domain != DOMAIN and not bodies(node) and node.name not in self.taken

    def _earlier(self, lacking: float) -> list[gs.Node]:
        """Returns the nodes to move from before the collective to behind it, in graph order. No
        node up to the collective depends on them. The last such nodes are chosen first, until they
        have `lacking` seconds of compute."""
        windows = self.windows
        chosen: list[gs.Node] = []
        moved: set[int] = set()
        needed = self._needed()
        for node in reversed(windows.nodes[: self.at]):
            if lacking <= 0.0 and any(map(self._may_be_awaited, chosen)):
                break
            readers = (r for t in node.outputs for r in windows.readers.get(id(t), ()))
            stays = any(windows.index[id(r)] < self.at and id(r) not in moved for r in readers)
            if stays or id(node) in needed or not self._is_movable(node):
                continue
            chosen.append(node)
            moved.add(id(node))
            lacking -= self._work([node])
        return chosen[::-1] if self._work(chosen) > 0.0 else []

    def _needed(self) -> set[int]:
        """Returns the ids of the nodes on which the operands of the collective depend."""
        windows = self.windows
        needed: set[int] = set()
        ready = [self.at]
        while ready:
            for tensor in windows.reads[ready.pop()]:
                maker = windows.makers.get(id(tensor))
                if maker is not None and id(maker) not in needed:
                    needed.add(id(maker))
                    ready.append(windows.index[id(maker)])
        return needed

    def _later(self, lacking: float) -> list[gs.Node]:
        """Returns the nodes to move from behind the collective's first reader to before it, in
        graph order. They depend neither on this reader nor on a collective under way. The first
        such nodes are chosen first, until they have `lacking` seconds of compute."""
        windows = self.windows
        pending = self._pending()
        possible: dict[int, gs.Node] = {}
        chosen: dict[int, gs.Node] = {}
        last: gs.Node | None = None
        for i in range(self.end, len(windows.nodes)):
            if lacking <= 0.0 and (last is None or self._may_be_awaited(last)):
                break
            node = windows.nodes[i]
            makers = [windows.makers.get(id(t)) for t in windows.reads[i]]
            is_ready = all(
                m is None
                or id(m) in possible
                or (windows.index[id(m)] < self.end and id(m) not in pending)
                for m in makers
            )
            if not is_ready or not self._is_movable(node):
                continue
            possible[id(node)] = node
            if self.seconds.get(node.name, 0.0) > 0.0:
                lacking -= self._add(node, possible, chosen)
                last = node
        order = [n for n in windows.nodes[self.end :] if id(n) in chosen]
        while order and not self._may_be_awaited(order[-1]):
            order.pop()
        return order

    def _add(
        self, node: gs.Node, possible: Mapping[int, gs.Node], chosen: dict[int, gs.Node]
    ) -> float:
        """Adds a node to `chosen`, with the nodes among `possible` on which it depends; returns the
        seconds that the added nodes compute."""
        if id(node) in chosen or id(node) not in possible:
            return 0.0
        chosen[id(node)] = node
        reads = self.windows.reads[self.windows.index[id(node)]]
        makers = [self.windows.makers.get(id(t)) for t in reads]
        before = sum(self._add(m, possible, chosen) for m in makers if m is not None)
        return before + self.seconds.get(node.name, 0.0)

    def _pending(self) -> set[int]:
        """Returns the ids of collectives that are still under way at the first reader, and of the
        nodes that only reshape their results."""
        pending: set[int] = set()
        for node in self.windows.nodes[: self.end]:
            if is_collective(node) and self.windows.reader(node) >= self.end:
                pending.add(id(node))
                pending |= {id(n) for n in self.windows.shaped(node)}
        return pending

    def _may_be_awaited(self, node: gs.Node) -> bool:
        """True for a product (with or without its bias) that onnxruntime does not fuse with a
        reader, such as an activation: waiting for the result would prevent such a fusion."""
        has_bias = node.op == "Add" and any(
            maker is not None and maker.op in PRODUCTS for maker in map(self._maker, node.inputs)
        )
        if not has_bias and node.op not in PRODUCTS:
            return False
        (y,) = node.outputs
        readers = self.windows.readers.get(id(y), ())
        fused = {"Add"} if node.op == "MatMul" else AFTER_PRODUCTS
        return not any(r.op in fused and not self._adds_up(r, y) for r in readers)

    def _adds_up(self, node: gs.Node, tensor: gs.Tensor) -> bool:
        """True if a node adds `tensor` to another computed tensor, not to a bias."""
        others = [self._maker(t) for t in node.inputs if t is not tensor]
        return node.op == "Add" and all(
            m is not None and m.domain != DOMAIN and m.op not in VIEWS for m in others
        )

    def _maker(self, tensor: gs.Tensor) -> gs.Node | None:
        return self.windows.makers.get(id(tensor))
