"""Starts collectives early and completes them late, so that what does not depend on them hides
them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import AFTER, COMPLETE, DOMAIN, KINDS, START
from onnxpar.graph.subgraphs import bodies, read_by
from onnxpar.lowering.streams import GroupsOf, collectives_in

VIEWS = frozenset(("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"))
"""Ops that wait with their operand at no cost."""
AHEAD = 2
"""How many nodes' parameters are gathered ahead at least: one that waits, and one for which the
link works meanwhile."""
_ARRANGING = VIEWS | {"Transpose", "Cast", "Slice", "Concat", "Split"}
"""Ops that may be moved with a gather, where they arrange parameters."""
Place = tuple[float, ...]
"""Where a node stands in the graph: places are compared item by item."""


@dataclass(frozen=True)
class Window:
    """What a rank can do while a collective is under way.

    start, end      the collective may start at the place `start`, and must be complete at `end`
    before, behind  the nodes that only prepare its operand, and that only shape its result
    between         the nodes that run in between, up to the next collective that waits for this one
    after           what the last of them computes, if the first reader of the result waits for it
    """

    collective: gs.Node
    start: Place
    end: Place
    before: Sequence[gs.Node]
    behind: Sequence[gs.Node]
    between: Sequence[gs.Node]
    after: gs.Tensor | None


def is_collective(node: gs.Node) -> bool:
    """True for a node that communicates."""
    return node.domain == DOMAIN and node.op in KINDS


class Windows:
    """Finds the windows of the collectives of a graph in topological order. Nodes in `heavy`
    compute; the others may be moved together with a collective. A collective in one op waits for
    those that were started in the same `groups`, and for no others. The first reader of a
    collective's result also waits for the tensor `awaited` of that collective, if it has one."""

    def __init__(
        self,
        graph: gs.Graph,
        heavy: Collection[str],
        groups: GroupsOf,
        awaited: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes = list(graph.nodes)
        self.groups = groups
        self.awaited = awaited or {}
        self.within = [{groups(each) for each in collectives_in(node)} for node in self.nodes]
        self.index = {id(node): i for i, node in enumerate(self.nodes)}
        self.reads = [read_by(node) for node in self.nodes]
        self.makers = {id(t): node for node in self.nodes for t in node.outputs}
        self.readers: dict[int, list[gs.Node]] = {}
        for node, tensors in zip(self.nodes, self.reads, strict=True):
            for tensor in tensors:
                self.readers.setdefault(id(tensor), []).append(node)
        self.heavy = [self._is_heavy(node, heavy) for node in self.nodes]
        self.arranging: set[int] = set()
        for i, node in enumerate(self.nodes):
            makers = [self.makers.get(id(t)) for t in self.reads[i]]
            known = all(m is None or self.index[id(m)] in self.arranging for m in makers)
            if known and node.op in _ARRANGING and node.domain != DOMAIN:
                self.arranging.add(i)

    def _is_heavy(self, node: gs.Node, heavy: Collection[str]) -> bool:
        computes = node.name in heavy and node.op not in VIEWS
        return computes or node.domain == DOMAIN or bool(bodies(node))

    def find(self, sizes: Mapping[str, int], most: int) -> list[Window]:
        """The windows of the collectives in `sizes`, which has the bytes of their tensors, in graph
        order.

        A gather ends where it is, and starts so early that ranks hold at most `most` bytes of
        gathered tensors, or those of AHEAD nodes. Others start where they are, and end at the first
        node that reads the result."""
        waits = [(i, w) for i, w in enumerate(self.within) if w and self.nodes[i].name not in sizes]
        cuts = {of: [i for i, w in waits if of in w] for of in set().union(*self.within)}
        found: list[Window] = []
        batch: list[int] = []
        batches: list[tuple[int, int]] = []
        for i, node in enumerate(self.nodes):
            if is_collective(node) and node.name in sizes:
                behind, end = self._behind(i)
                if KINDS[node.op].is_late and end < len(self.nodes):
                    batch.append(i)
                else:
                    between = self._between(i, end, cuts[self.groups(node)])
                    found.append(self._window(i, (i,), (end - 0.5, i), (), behind, between))
            elif self.heavy[i] and batch:
                batches.append((batch[-1], sum(sizes[self.nodes[b].name] for b in batch)))
                fetched = _fetched(batches, most)
                for each in batch:
                    own = cuts[self.groups(self.nodes[each])]
                    found.append(self._early(each, fetched, own))
                batch = []
        assert not batch, "a gather that no node reads"
        return sorted(found, key=lambda w: self.index[id(w.collective)])

    def _early(self, at: int, fetched: int, cuts: Sequence[int]) -> Window:
        """The window of a gather that ends where it is, and starts after the index `fetched`, and
        after what would wait for it."""
        before, first = self._before(at)
        start = max(first, fetched, *(c for c in cuts if c < at))
        between = self._between(start, at, cuts)
        before = [n for n in before if self.index[id(n)] > start]
        return self._window(at, (start + 0.25, at), (at,), before, self._behind(at)[0], between)

    def _window(
        self,
        at: int,
        start: Place,
        end: Place,
        before: Sequence[gs.Node],
        behind: Sequence[gs.Node],
        between: Sequence[int],
    ) -> Window:
        nodes = [self.nodes[i] for i in between]
        computed = {id(n) for n in nodes if not is_collective(n)}  # tokens order the others
        after = self._after(at, [*behind], computed)
        name = self.awaited.get(self.nodes[at].name)
        after = next((t for n in nodes for t in n.outputs if t.name == name), after)
        return Window(self.nodes[at], start, end, before, behind, nodes, after)

    def reader(self, node: gs.Node) -> int:
        """The index of the first node that computes with the result of a collective; the number of
        nodes if there is none."""
        return self._behind(self.index[id(node)])[1]

    def shaped(self, node: gs.Node) -> list[gs.Node]:
        """The nodes that only shape the result of a collective."""
        return self._behind(self.index[id(node)])[0]

    def _behind(self, at: int) -> tuple[list[gs.Node], int]:
        """The nodes that only shape the result of a collective, and the index of the first other
        node that reads it."""
        shaped: dict[int, gs.Node] = {}
        end, ready = len(self.nodes), [self.nodes[at]]
        while ready:
            for tensor in ready.pop().outputs:
                for node in self.readers.get(id(tensor), ()):
                    i = self.index[id(node)]
                    if self.heavy[i]:
                        end = min(end, i)
                    elif i not in shaped:
                        shaped[i] = node
                        ready.append(node)
        return [shaped[i] for i in sorted(shaped)], end

    def _before(self, at: int) -> tuple[list[gs.Node], int]:
        """The nodes that only prepare the operand of a collective, and the index of the last other
        node that it depends on; -1 if there is none."""
        shaped: dict[int, gs.Node] = {}
        first, ready = -1, [at]
        while ready:
            for tensor in self.reads[ready.pop()]:
                maker = self.makers.get(id(tensor))
                if maker is None:
                    continue
                i = self.index[id(maker)]
                if self.heavy[i] and i not in self.arranging:
                    first = max(first, i)
                elif i not in shaped:
                    shaped[i] = maker
                    ready.append(i)
        return [shaped[i] for i in sorted(shaped)], first

    def _between(self, start: int, end: int, cuts: Sequence[int]) -> list[int]:
        """The nodes that compute from after `start` to before `end`, up to one of `cuts`."""
        stop = min((c for c in cuts if start < c < end), default=end)
        return [i for i in range(start + 1, stop) if self.heavy[i]]

    def _after(self, at: int, behind: list[gs.Node], between: Collection[int]) -> gs.Tensor | None:
        """Of the other operands of those that read the result first, the one that is computed
        last, if that is in the window."""
        readers = [
            reader
            for node in [self.nodes[at], *behind]
            for tensor in node.outputs
            for reader in self.readers.get(id(tensor), ())
            if self.heavy[self.index[id(reader)]]
        ]
        if not readers:
            return None
        first = min(readers, key=lambda reader: self.index[id(reader)])
        found = [t for t in map(self._source, first.inputs) if id(self._maker(t)) in between]
        found = [t for t in found if t.name]
        return max(found, key=lambda t: self.index[id(self.makers[id(t)])], default=None)

    def _maker(self, tensor: gs.Tensor) -> gs.Node | None:
        return self.makers.get(id(tensor))

    def _source(self, tensor: gs.Tensor) -> gs.Tensor:
        """The tensor of which this one is a view."""
        maker = self._maker(tensor)
        while maker is not None and maker.op in VIEWS:
            tensor = maker.inputs[0]
            maker = self._maker(tensor)
        return tensor


def _fetched(batches: Sequence[tuple[int, int]], most: int) -> int:
    """The index of the gather that must be complete before the last of these batches starts; -1 if
    there is none. Each batch is the index of its last gather, and its bytes."""
    held = batches[-1][1]
    for number, (at, size) in enumerate(reversed(batches[:-1]), 1):
        held += size
        if number >= AHEAD and held > most:
            return at
    return -1


def split(graph: gs.Graph, windows: Iterable[Window]) -> None:
    """Replaces the collective of each window by a start and a completion, at both ends of the
    window. The graph must be sorted topologically, and stays so."""
    places: dict[int, Place] = {id(node): (i,) for i, node in enumerate(graph.nodes)}
    nodes = list(graph.nodes)
    for window in windows:
        node = window.collective
        y, name = node.outputs[0], f"{node.name}::complete"
        pending = gs.Variable(f"{node.name}::pending", y.dtype, None)
        node.op = START + node.op
        node.outputs = [pending]
        complete = gs.Node(COMPLETE, name, {}, [pending], [y], domain=DOMAIN)
        if window.after is not None:
            after = gs.Node(AFTER, f"{node.name}::after", {}, [window.after], [], domain=DOMAIN)
            places[id(after)] = (*window.end, 0)
            nodes.append(after)
        nodes.append(complete)
        places[id(complete)] = (*window.end, 1)
        for i, each in enumerate(window.before):  # one node may prepare several gathers
            places[id(each)] = min(places[id(each)], (*window.start, 0, i))
        places[id(node)] = (*window.start, 1)
        for i, each in enumerate(window.behind):
            places[id(each)] = max(places[id(each)], (*window.end, 2, i))
    graph.nodes = sorted(nodes, key=lambda node: places[id(node)])
    made = {id(t) for node in graph.nodes for t in node.outputs}
    for node in graph.nodes:
        assert not any(id(t) in made for t in read_by(node)), f"'{node.name}' is out of order"
        made -= {id(t) for t in node.outputs}
