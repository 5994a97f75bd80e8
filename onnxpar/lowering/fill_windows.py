"""Moves nodes to where a collective is under way, if too little runs there to hide it.

    y = AllToAllV(x, n, m)           y = AllToAllV(x, n, m)
    z = Scan(y, w)             to    s = MatMul(x, v)
    s = MatMul(x, v)                 z = Scan(y, w)

So a shared expert computes while tokens travel to the others.
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
"""Collectives take alike long if none takes this many times as long as another: a short one must
not take the only product that could hide a long one."""


@dataclass(frozen=True)
class Filling:
    """Nodes that run while a collective is under way, all by name: behind its start if they were
    `earlier` than it, else before the first reader of its result. That reader also waits for the
    tensor `awaited`, since onnxruntime would else run it first."""

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
    """Moves nodes of a graph in topological order, which stays so; returns what it moved.

    heavy, groups  those of `Windows`
    seconds        in which each node computes, by name
    wanted         seconds that nodes should compute while each collective is under way, by name
    least          fewer seconds than this are not worth a start

    Of collectives that take alike long, the last is the first to get nodes that are earlier than
    it, and the first one to get those behind it: what it leaves, others can still get."""
    found: list[Filling] = []
    if len({node.name for node in graph.nodes}) < len(graph.nodes):
        return found  # it is not known which nodes are meant
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
        taken = {each for filling in found for each in filling.nodes}
        each = _Window(windows, name, seconds, taken).filling(wanted[name], least(name), earlier)
        if each is not None:
            found.append(each)
            _move(graph, windows, each)
            windows = Windows(graph, heavy, groups)
    return found


def fill(
    graph: gs.Graph, heavy: Collection[str], groups: GroupsOf, fillings: Iterable[Filling]
) -> None:
    """Moves the nodes again, one filling after the other, in a graph with the same names."""
    for each in fillings:
        _move(graph, Windows(graph, heavy, groups), each)


def _move(graph: gs.Graph, windows: Windows, filling: Filling) -> None:
    by_name = {node.name: node for node in graph.nodes}
    node = by_name[filling.collective]
    beside = node if filling.earlier else windows.nodes[windows.reader(node)]
    moved = [by_name[name] for name in filling.nodes]
    gone = {id(n) for n in moved}
    nodes = [n for n in graph.nodes if id(n) not in gone]
    at = next(i for i, n in enumerate(nodes) if n is beside) + filling.earlier
    graph.nodes = [*nodes[:at], *moved, *nodes[at:]]


class _Window:
    """What could run while a collective is under way, besides what does."""

    def __init__(
        self, windows: Windows, name: str, seconds: Mapping[str, float], taken: Collection[str]
    ) -> None:
        self.windows, self.seconds, self.taken = windows, seconds, taken
        self.node = next(node for node in windows.nodes if node.name == name)
        self.at, self.end = windows.index[id(self.node)], windows.reader(self.node)

    def filling(self, wanted: float, least: float, earlier: bool) -> Filling | None:
        """What to move so that nodes compute for `wanted` seconds, or as long as they can; None if
        nothing is to be moved, or if they would compute for no more than `least`."""
        nodes = self.windows.nodes
        if self.end == len(nodes):
            return None
        lacking = wanted - self._work(nodes[self.at + 1 : self.end])
        if lacking <= 0.0:
            return None
        found = self._earlier(lacking) if earlier else self._later(lacking)
        ends = [node for node in found if self._may_be_awaited(node)]
        if not ends or wanted - lacking + self._work(found) <= least:
            return None
        names = tuple(node.name for node in found)
        return Filling(self.node.name, names, ends[-1].outputs[0].name, earlier)

    def _work(self, nodes: Iterable[gs.Node]) -> float:
        return sum(self.seconds.get(node.name, 0.0) for node in nodes)

    def _moves(self, node: gs.Node) -> bool:
        return node.domain != DOMAIN and not bodies(node) and node.name not in self.taken

    def _earlier(self, lacking: float) -> list[gs.Node]:
        """Nodes before the collective that it does not need, from the last one on, without those
        that others before it read."""
        windows = self.windows
        found: list[gs.Node] = []
        moved: set[int] = set()
        needed = self._needed()
        for node in reversed(windows.nodes[: self.at]):
            if lacking <= 0.0 and any(map(self._may_be_awaited, found)):
                break
            readers = (r for t in node.outputs for r in windows.readers.get(id(t), ()))
            stays = any(windows.index[id(r)] < self.at and id(r) not in moved for r in readers)
            if stays or id(node) in needed or not self._moves(node):
                continue
            found.append(node)
            moved.add(id(node))
            lacking -= self._work([node])
        return found[::-1] if self._work(found) > 0.0 else []

    def _needed(self) -> set[int]:
        """The nodes on which the operands of the collective depend."""
        windows = self.windows
        found: set[int] = set()
        ready = [self.at]
        while ready:
            for tensor in windows.reads[ready.pop()]:
                maker = windows.makers.get(id(tensor))
                if maker is not None and id(maker) not in found:
                    found.add(id(maker))
                    ready.append(windows.index[id(maker)])
        return found

    def _later(self, lacking: float) -> list[gs.Node]:
        """Nodes behind the first reader that neither wait for it, nor for a collective, from the
        first one on."""
        windows = self.windows
        pending = self._pending()
        possible: dict[int, gs.Node] = {}
        found: dict[int, gs.Node] = {}
        last: gs.Node | None = None
        for i in range(self.end, len(windows.nodes)):
            if lacking <= 0.0 and (last is None or self._may_be_awaited(last)):
                break
            node = windows.nodes[i]
            makers = [windows.makers.get(id(t)) for t in windows.reads[i]]
            known = all(
                m is None
                or id(m) in possible
                or (windows.index[id(m)] < self.end and id(m) not in pending)
                for m in makers
            )
            if not known or not self._moves(node):
                continue
            possible[id(node)] = node
            if self.seconds.get(node.name, 0.0) > 0.0:
                lacking -= self._add(node, possible, found)
                last = node
        order = [n for n in windows.nodes[self.end :] if id(n) in found]
        while order and not self._may_be_awaited(order[-1]):
            order.pop()
        return order

    def _add(
        self, node: gs.Node, possible: Mapping[int, gs.Node], found: dict[int, gs.Node]
    ) -> float:
        """Adds a node, and those on which it depends; returns the seconds that they compute."""
        if id(node) in found or id(node) not in possible:
            return 0.0
        found[id(node)] = node
        reads = self.windows.reads[self.windows.index[id(node)]]
        makers = [self.windows.makers.get(id(t)) for t in reads]
        own = sum(self._add(m, possible, found) for m in makers if m is not None)
        return own + self.seconds.get(node.name, 0.0)

    def _pending(self) -> set[int]:
        """The collectives before the first reader whose results nothing has read there, and the
        nodes that only shape these results."""
        found: set[int] = set()
        for node in self.windows.nodes[: self.end]:
            if is_collective(node) and self.windows.reader(node) >= self.end:
                found.add(id(node))
                found |= {id(n) for n in self.windows.shaped(node)}
        return found

    def _may_be_awaited(self, node: gs.Node) -> bool:
        """True for a product, with or without its bias, that onnxruntime does not fuse with a
        reader: one more reader would keep it from that. A MatMul alone has no activation."""
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
        """True if a node adds a tensor to what another node computes, and no bias."""
        others = [self._maker(t) for t in node.inputs if t is not tensor]
        return node.op == "Add" and all(
            m is not None and m.domain != DOMAIN and m.op not in VIEWS for m in others
        )

    def _maker(self, tensor: gs.Tensor) -> gs.Node | None:
        return self.windows.makers.get(id(tensor))
