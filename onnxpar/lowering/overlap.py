"""Starts collectives early and completes them late, so that independent compute hides them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import AFTER, COMPLETE, DOMAIN, KINDS, START
from onnxpar.graph.subgraphs import bodies, read_by
from onnxpar.lowering.streams import GroupsOf, collectives_in

VIEWS = frozenset(("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"))
"""Ops that cost nothing, and may wait together with their operand."""
AHEAD = 2
"""Parameters are gathered ahead for at least this many nodes: for the node that waits, and for the
next one, whose parameters the link moves meanwhile."""
_ARRANGING = VIEWS | {"Transpose", "Cast", "Slice", "Concat", "Split"}
"""Ops that may move together with a gather, where they rearrange parameters."""
Place = tuple[float, ...]
"""The position of a node in the graph; positions are compared item by item."""


@dataclass(frozen=True)
class Window:
    """The window of a collective: the part of the graph in which it is under way, and the nodes
    that a rank can run there.

    start, end  the collective may start at the place `start`, and must be complete at `end`
    before      nodes that only prepare the operand of the collective
    behind      nodes that only shape the result of the collective
    between     nodes that compute meanwhile, up to the next collective that waits for this one
    after       a result of a node in `between`; the first reader of the collective waits for it
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
    """Finds the windows of collectives (the parts of the graph in which each is under way) in a
    topologically sorted graph.

    heavy    names of the nodes that compute; other nodes may move together with a collective
    groups   returns the groups of ranks of a collective: one that is not split into start and
             completion waits only for started collectives of the same groups
    awaited  by collective, the tensor for which the first reader of its result waits, too
    """

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
        self.within = [{groups(inner) for inner in collectives_in(node)} for node in self.nodes]
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
            arranges = all(m is None or self.index[id(m)] in self.arranging for m in makers)
            if arranges and node.op in _ARRANGING and node.domain != DOMAIN:
                self.arranging.add(i)

    def _is_heavy(self, node: gs.Node, heavy: Collection[str]) -> bool:
        """True for a node that takes time: it computes, communicates, or has a body. `heavy` has
        the names of nodes that compute."""
        computes = node.name in heavy and node.op not in VIEWS
        return computes or node.domain == DOMAIN or bool(bodies(node))

    def find(self, sizes: Mapping[str, int], most: int) -> list[Window]:
        """Returns the windows of the collectives in `sizes`, which has their bytes by name, in
        graph order.

        A gather ends at its place in the graph, and starts as early as possible while ranks hold at
        most `most` bytes of gathered tensors, or the tensors of AHEAD nodes. Any other collective
        starts at its place, and ends at the first node that reads its result.
        """
        waits = [(i, w) for i, w in enumerate(self.within) if w and self.nodes[i].name not in sizes]
        cuts = {of: [i for i, w in waits if of in w] for of in set().union(*self.within)}
        windows: list[Window] = []
        batch: list[int] = []
        batches: list[tuple[int, int]] = []
        for i, node in enumerate(self.nodes):
            if is_collective(node) and node.name in sizes:
                behind, end = self._behind(i)
                if KINDS[node.op].is_late and end < len(self.nodes):
                    batch.append(i)
                else:
                    between = self._between(i, end, cuts[self.groups(node)])
                    windows.append(self._window(i, (i,), (end - 0.5, i), (), behind, between))
            elif self.heavy[i] and batch:
                batches.append((batch[-1], sum(sizes[self.nodes[b].name] for b in batch)))
                fetched = _fetched(batches, most)
                for gather in batch:
                    group_cuts = cuts[self.groups(self.nodes[gather])]
                    windows.append(self._early(gather, fetched, group_cuts))
                batch = []
        assert not batch, "a gather that no node reads"
        return sorted(windows, key=lambda w: self.index[id(w.collective)])

    def _early(self, at: int, fetched: int, cuts: Sequence[int]) -> Window:
        """Returns the window of the gather at index `at`: the part of the graph in which it is
        under way. It ends at the gather's place; it starts after index `fetched`, after the nodes
        on which the gather depends, and after any collective (indices `cuts`) that would wait for
        it."""
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
        """Returns the window of the collective at index `at`, with these fields of a Window.
        `between` are the indices of the nodes that compute while it is under way."""
        nodes = [self.nodes[i] for i in between]
        computed = {id(n) for n in nodes if not is_collective(n)}  # tokens order collectives
        after = self._after(at, [*behind], computed)
        name = self.awaited.get(self.nodes[at].name)
        after = next((t for n in nodes for t in n.outputs if t.name == name), after)
        return Window(self.nodes[at], start, end, before, behind, nodes, after)

    def reader(self, node: gs.Node) -> int:
        """Returns the index of the first node that computes with the result of a collective; the
        number of nodes if there is none."""
        return self._behind(self.index[id(node)])[1]

    def shaped(self, node: gs.Node) -> list[gs.Node]:
        """Returns the nodes that only reshape or rearrange the result of a collective."""
        return self._behind(self.index[id(node)])[0]

    def _behind(self, at: int) -> tuple[list[gs.Node], int]:
        """Returns the nodes that only reshape or rearrange the result of the collective at index
        `at`, and the index of the first node that computes with it."""
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
        """Returns the nodes that only prepare the operand of the collective at index `at`, and the
        index of the last other node on which the operand depends; -1 if there is none."""
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
        """Returns the indices of the computing nodes between `start` and `end`, but only up to the
        first collective (in `cuts`) that would wait for the one under way."""
        stop = min((c for c in cuts if start < c < end), default=end)
        return [i for i in range(start + 1, stop) if self.heavy[i]]

    def _after(self, at: int, behind: list[gs.Node], between: Collection[int]) -> gs.Tensor | None:
        """Returns the tensor for which the first reader of a collective's result must wait, too:
        the last operand of the reader that nodes compute while the collective is under way. None if
        there is none.

        at       the index of the collective
        behind   the nodes that only reshape its result
        between  the ids of the nodes that compute meanwhile
        """
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
        sources = [t for t in map(self._source, first.inputs) if id(self._maker(t)) in between]
        sources = [t for t in sources if t.name]
        return max(sources, key=lambda t: self.index[id(self.makers[id(t)])], default=None)

    def _maker(self, tensor: gs.Tensor) -> gs.Node | None:
        return self.makers.get(id(tensor))

    def _source(self, tensor: gs.Tensor) -> gs.Tensor:
        """Returns the tensor that this tensor is a view of; the tensor itself if it is no view."""
        maker = self._maker(tensor)
        while maker is not None and maker.op in VIEWS:
            tensor = maker.inputs[0]
            maker = self._maker(tensor)
        return tensor


def _fetched(batches: Sequence[tuple[int, int]], most: int) -> int:
    """Returns the index of the gather that must be complete before the last batch of gathers
    starts, so that ranks hold at most `most` bytes of gathered tensors; -1 if there is none. A
    batch is (index of its last gather, bytes)."""
    held = batches[-1][1]
    for number, (at, size) in enumerate(reversed(batches[:-1]), 1):
        held += size
        if number >= AHEAD and held > most:
            return at
    return -1


def split(graph: gs.Graph, windows: Iterable[Window]) -> None:
    """Replaces the collective of each window by two nodes, in place: one that starts it, and one
    that completes it, at both ends of the window. The graph must be sorted topologically, and stays
    sorted."""
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
        for i, moved in enumerate(window.before):  # one node may prepare several gathers
            places[id(moved)] = min(places[id(moved)], (*window.start, 0, i))
        places[id(node)] = (*window.start, 1)
        for i, moved in enumerate(window.behind):
            places[id(moved)] = max(places[id(moved)], (*window.end, 2, i))
    graph.nodes = sorted(nodes, key=lambda node: places[id(node)])
    pending_results = {id(t) for node in graph.nodes for t in node.outputs}
    for node in graph.nodes:
        is_early = any(id(t) in pending_results for t in read_by(node))
        assert not is_early, f"'{node.name}' is out of order"
        pending_results -= {id(t) for t in node.outputs}
