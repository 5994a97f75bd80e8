"""The search for a strategy as a sum of tables: a variable for how each node is split, a table for
what its work takes, and one for each tensor: what the reshards between its maker and its readers
take."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.arrays import Array
from onnxpar.factors import Links, OpFactors
from onnxpar.placements import Placements
from onnxpar.plan import element_bytes
from onnxpar.search.choices import Choice, choices_of, pending_kinds
from onnxpar.search.conditioning import minimize_in_parts
from onnxpar.search.elimination import Table, TooLarge, exhaust, minimize
from onnxpar.search.repeats import tied
from onnxpar.search.work import work_seconds
from onnxpar.sharding import Placement, Sharding
from onnxpar.subgraphs import captured, constants

MOST_TOGETHER = 1 << 16
"""Entries of a table over the maker and all readers of a tensor. Where it would have more, each is
served by itself, from what is made or from one placement that is made of it for all: of up to two
readers that is exact, of more nearly."""


@dataclass(frozen=True)
class _Port:
    """Where a node makes or reads a tensor; `index` is None where a body is handed it, or hands it
    back."""

    op: OpFactors
    index: int | None
    links: Links = ()

    def made(self, choice: Choice) -> Placement:
        """How the node makes it."""
        if self.index is None:
            return Placement(choice.leaves(self.links))
        return choice.result(self.op, self.index)

    def needed(self, choice: Choice) -> Placement:
        """How the node reads it."""
        if self.index is None:
            return Placement(choice.leaves(self.links))
        return choice.operand(self.op, self.index)


@dataclass(frozen=True)
class _End:
    """A tensor's placement by the value of a variable; of no variable there is but one value."""

    variable: int | None
    placements: tuple[Placement, ...]


class Problem:
    """Everything that a strategy decides about a graph, and what it costs. Nodes that take the same
    place in repeated blocks are one variable, tensors between such nodes one table, times their
    number."""

    def __init__(
        self, graph: gs.Graph, sharding: Sharding, states: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.sharding = sharding
        known = sharding.factors.tensors
        self.after = {a: b for a, b in states if a in known and b in known}
        self.states = {after: before for before, after in self.after.items()}
        self.sizes: list[int] = []
        self.tables: list[Table] = []
        self.choices: dict[str, list[Choice]] = {}
        self.variable: dict[str, int] = {}
        self.outputs = {t.name for t in graph.outputs}
        self.makers: dict[str, _Port] = {}
        self.readers: dict[str, list[_Port | None]] = defaultdict(list)
        self.held: dict[Hashable, _End] = {}
        self.known: dict[Hashable, Array] = {}
        self._add_nodes()
        weights = {t.name for t in constants(graph)} - sharding.pinned
        tensors = {t.name: t for op in sharding.factors.ops for t, _ in op.operands()}
        alike: dict[Hashable, list[gs.Tensor]] = defaultdict(list)
        for name, tensor in tensors.items():
            if name in sharding.factors.tensors and name not in weights:
                alike[self._key(name)].append(tensor)
        for found in alike.values():
            self._add_tensor(found[0], len(found))

    def solve(
        self, exhaustively: bool = False
    ) -> tuple[float, dict[str, Choice], dict[str, Placement]]:
        """The least seconds of a run, the choice for each node by name, and how states are held;
        where nodes depend on each other too much for that, few seconds. Errors: TooLarge where all
        strategies are to be tried, and there are too many."""
        try:
            if exhaustively:
                seconds, values = exhaust(self.sizes, self.tables)
            else:
                seconds, values = minimize(self.sizes, self.tables)
        except TooLarge:
            if exhaustively:
                raise
            first = dict.fromkeys(self.variable.values(), 0)
            seconds, values, _ = minimize_in_parts(self.sizes, self.tables, first)
        chosen = {n: self.choices[n][values[v]] for n, v in self.variable.items()}
        states = {n: self._fed(n) for n in self.states.values()}
        held = {
            name: end.placements[0 if end.variable is None else values[end.variable]]
            for name, end in states.items()
        }
        return seconds, chosen, held

    def _add_variable(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _add_nodes(self) -> None:
        """The variables of nodes, what their work takes, and their ports."""
        ops = self.sharding.factors.ops
        kinds = pending_kinds(ops)
        classes: dict[int, list[OpFactors]] = defaultdict(list)
        for number, op in zip(tied(self.sharding, kinds), ops, strict=True):
            classes[number].append(op)
        for alike in classes.values():
            choices = choices_of(alike[0], self.sharding, kinds)
            variable = self._add_variable(len(choices))
            work = [work_seconds(alike[0], choice, self.sharding) for choice in choices]
            self.tables.append(Table((variable,), len(alike) * np.array(work)))
            for op in alike:
                self.choices[op.node.name] = choices
                self.variable[op.node.name] = variable
        for op in ops:
            self._add_ports(op)

    def _add_ports(self, op: OpFactors) -> None:
        for i, tensor in enumerate(op.node.inputs):
            self.readers[tensor.name].append(_Port(op, i))
        for i, tensor in enumerate(op.node.outputs):
            self.makers[tensor.name] = _Port(op, i)
        for body in op.bodies:
            for tensor, links in zip(body.graph.inputs, body.inputs, strict=True):
                self.makers[tensor.name] = _Port(op, None, links)
            for tensor, links in zip(body.graph.outputs, body.outputs, strict=True):
                self.readers[tensor.name].append(_Port(op, None, links))
        for tensor, _, _ in [] if op.bodies else captured(op.node):
            self.readers[tensor.name].append(None)

    def _key(self, name: str) -> Hashable:
        """What tensors have in common that are one table: their factors, and where they are made
        and read."""
        factors = self.sharding.factors.tensors[name]
        sizes = tuple(leaf.size for leaf in factors.leaves)
        maker = self.makers.get(name)
        readers = Counter(map(self._place, self.readers[name]))
        pinned = name in self.sharding.pinned
        return (
            (factors.dims, factors.dim_of_leaf, factors.apart, sizes),
            self.sharding.tensor_placement(name) if pinned else None,
            None if maker is None else self._place(maker),
            frozenset(readers.items()),
            name in self.outputs,
            self._key(self.states[name]) if name in self.states else None,
        )

    def _place(self, port: _Port | None) -> Hashable:
        if port is None:
            return None
        return self.variable[port.op.node.name], port.index, port.links

    def _add_tensor(self, tensor: gs.Tensor, times: int) -> None:
        """Tables over the variables of the nodes that make and read a tensor, and of others."""
        name = tensor.name
        whole = Placement(tuple(() for _ in self.sharding.factors.tensors[name].leaves))
        maker = self.makers.get(name)
        ends = (self._end(port, whole, reads=True) for port in self.readers[name])
        needs = list(dict.fromkeys(ends))
        made = self._fed(name) if maker is None else self._end(maker, whole)
        asked = self._asked(name, made)
        ways = _Ways(self.sharding, tensor, [made, asked, *needs], self.known)
        if asked is not made:
            self._add_table([made, asked], times * ways.paths(made, asked))
        if len(needs) == 1:
            self._add_table([asked, *needs], times * ways.paths(asked, needs[0]))
        elif needs:
            self._serve([self._distinct(end) for end in (asked, *needs)], ways, times)

    def _end(self, port: _Port | None, whole: Placement, reads: bool = False) -> _End:
        """How a tensor is at a port, by the node's choice."""
        if port is None:
            return _End(None, (whole,))
        name = port.op.node.name
        placed = port.needed if reads else port.made
        placements = tuple(placed(c) for c in self.choices[name])
        if len(set(placements)) == 1:
            return _End(None, placements[:1])
        return _End(self.variable[name], placements)

    def _fed(self, name: str) -> _End:
        """What is fed, and what a state is, is as it suits: a variable of its own."""
        if name in self.sharding.pinned:
            return _End(None, (self.sharding.tensor_placement(name),))
        key = self._key(name)
        if key not in self.held:
            whole = Placement(tuple(() for _ in self.sharding.factors.tensors[name].leaves))
            ends = [self._end(port, whole, reads=True) for port in self.readers[name]]
            placements = [p for end in ends for p in end.placements if not p.partial]
            if name in self.after:
                placements = [self._as_state(p, name, name) for p in placements]
            candidates = tuple(dict.fromkeys((whole, *placements)))
            self.held[key] = _End(self._add_variable(len(candidates)), candidates)
        return self.held[key]

    def _asked(self, name: str, made: _End) -> _End:
        """How a tensor is before anything reads it: as is asked for, as the state that it becomes,
        with nothing pending where it is a result of the graph, else as it is made."""
        if name in self.sharding.pinned:
            return _End(None, (self.sharding.tensor_placement(name),))
        if name in self.states:
            state = self._fed(self.states[name])
            held = (self._as_state(p, self.states[name], name) for p in state.placements)
            return _End(state.variable, tuple(held))
        if name in self.outputs:
            return _End(made.variable, tuple(p.reduced() for p in made.placements))
        return made

    def _as_state(self, placement: Placement, source: str, name: str) -> Placement:
        """A placement of the input of a state pair as one of either end."""
        result = self.after[source]
        return Placement(self.sharding.state_leaves(placement.leaves, source, result, name))

    def _distinct(self, end: _End) -> _End:
        """The same by a variable whose values are the placements, where these are fewer."""
        distinct = tuple(dict.fromkeys(end.placements))
        if end.variable is None or len(distinct) == len(end.placements):
            return end
        variable = self._add_variable(len(distinct))
        allowed = np.full((len(end.placements), len(distinct)), np.inf)
        for i, placement in enumerate(end.placements):
            allowed[i, distinct.index(placement)] = 0
        self.tables.append(Table((end.variable, variable), allowed))
        return _End(variable, distinct)

    def _serve(self, ends: Sequence[_End], ways: _Ways, times: int) -> None:
        """What several readers cost together."""
        if len(ends) <= 5 and math.prod(len(e.placements) for e in ends) <= MOST_TOGETHER:
            self._add_table(ends, times * ways.tree(ends))
            return
        made, *needs = ends
        placements = {p.reduced() for p in made.placements}
        placements |= {p for end in needs for p in end.placements if not p.partial}
        shared = tuple(sorted(placements, key=repr))
        common = _End(self._add_variable(len(shared)), shared)
        self._add_table([made, common], times * ways.paths(made, common))
        for need in needs:
            one = ways.paths(made, need)[:, None, :]
            other = ways.onward(common, need)[None, :, :]
            self._add_table([made, common, need], times * np.minimum(one, other))

    def _add_table(self, ends: Sequence[_End], values: Array) -> None:
        """A table with an axis for each end; those of no variable have one entry."""
        fixed = tuple(i for i, end in enumerate(ends) if end.variable is None)
        scope = tuple(end.variable for end in ends if end.variable is not None)
        self.tables.append(Table(scope, np.squeeze(values, axis=fixed)))


class _Ways:
    """Seconds between the placements of a tensor."""

    def __init__(
        self,
        sharding: Sharding,
        tensor: gs.Tensor,
        ends: Sequence[_End],
        known: dict[Hashable, Array],
    ) -> None:
        placements = list(dict.fromkeys(p for end in ends for p in end.placements))
        self.index = {p: i for i, p in enumerate(placements)}
        factors = sharding.factors.tensors[tensor.name]
        parts = partial(sharding.part_sizes, tensor.name) if sharding.parts else None
        size = element_bytes(tensor)
        key = (*placements, factors.dims, size, tensor.name if parts else None)
        if key not in known:
            known[key] = Placements(placements, factors, sharding.costs, size, parts).seconds()
        self.seconds = known[key]
        pending = np.array([bool(p.partial) for p in placements])
        self.again = np.where(pending[:, None] & ~pending[None, :], np.inf, self.seconds)

    def at(self, end: _End) -> Array:
        """The placements of an end by number."""
        return np.array([self.index[p] for p in end.placements])

    def paths(self, start: _End, goal: _End) -> Array:
        """Seconds from each placement as it is made to each goal."""
        found: Array = self.seconds[np.ix_(self.at(start), self.at(goal))]
        return found

    def onward(self, start: _End, goal: _End) -> Array:
        """The same from what was resharded already, where a sum is reduced only once."""
        found: Array = self.again[np.ix_(self.at(start), self.at(goal))]
        return found

    def tree(self, ends: Sequence[_End]) -> Array:
        """Seconds to serve all but the first of several ends from that, each from whatever is there
        by then, in the best order."""
        count = len(ends)
        best: Array = np.full([len(end.placements) for end in ends], np.inf)
        for order in permutations(range(1, count)):
            total: Array = np.zeros([1] * count)
            for n, goal in enumerate(order):
                paths = [_spread(self.paths(ends[0], ends[goal]), 0, goal, count)]
                for source in order[:n]:
                    onward = self.onward(ends[source], ends[goal])
                    paths.append(_spread(onward, source, goal, count))
                step = paths[0]
                for path in paths[1:]:
                    step = np.minimum(step, path)
                total = total + step
            best = np.minimum(best, total)
        return best


def _spread(values: Array, row: int, column: int, count: int) -> Array:
    """A matrix as an array of `count` axes, of which two are its own."""
    if row > column:
        values, row, column = values.T, column, row
    shape = [1] * count
    shape[row], shape[column] = values.shape
    return values.reshape(shape)
