"""The search for a strategy as a sum of tables: a variable for how each node is split, a table for
what its work takes, and one for each tensor: what the reshards between its maker and its readers
take."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.errors import StrategyError
from onnxpar.ir.repetitions import iterations, repetitions
from onnxpar.ir.subgraphs import captured, constants
from onnxpar.ir.training_spec import Step
from onnxpar.search.gradient_sums import GradientSums
from onnxpar.search.memory_timeline import LiveRange, MemoryTimeline
from onnxpar.search.objective import THROUGHPUT, Objective
from onnxpar.search.op_cost import op_cost
from onnxpar.search.op_strategies import Kept, OpStrategy, choices_of, partial_kinds
from onnxpar.search.repeats import tied
from onnxpar.search.reshard_costs import ReshardCosts, ShardingDomain
from onnxpar.search.serving import Serving
from onnxpar.search.solver.column_generation import minimize_within
from onnxpar.search.solver.elimination import Table, TooLarge, diagonal, minimize
from onnxpar.search.solver.limits import Limit, exhaust_within
from onnxpar.search.solver.pruning import among, minimize_in_parts
from onnxpar.search.sums import Sums
from onnxpar.sharding.factors import Links, OpFactors
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState

MOST_CHOICES, FEWEST_CHOICES = 1 << 12, 1 << 3
"""Combinations of what a node does on each axis of the mesh that are looked at; and so many at
least where tables would have more than MOST_ENTRIES entries."""
MOST_ENTRIES = 20 << 20
"""Entries of all tables of a sum, 160 MB; elimination and messages take several times as much."""
LESS = 0.75
"""The share of its choices that a node keeps then, at most."""
PASSING = 1e-12
"""Seconds that are added to a node that a sum passes pending, as the compiler lets sums pass only
where that gains something."""


@dataclass(frozen=True)
class _Port:
    """Where a node makes or reads a tensor; `index` is None where a body is handed it, or hands it
    back. What bodies that take no part read `is_whole`."""

    op: OpFactors
    index: int | None
    links: Links = ()
    is_whole: bool = False

    def produced(self, choice: OpStrategy) -> FactorSharding:
        """How the node makes it."""
        if self.index is None:
            return FactorSharding(choice.leaves(self.links))
        return choice.result(self.op, self.index)

    def needed(self, choice: OpStrategy) -> FactorSharding:
        """How the node reads it."""
        if self.index is None:
            return FactorSharding(choice.leaves(self.links))
        return choice.operand(self.op, self.index)


class Problem:
    """Everything that a strategy decides about a graph, and what it costs. Nodes that take the same
    place in repeated blocks are one variable, tensors between such nodes one table, times their
    number. Of another search, what is `kept` stands. Of a training `step`, sums over ranks of
    gradients take what they do when they are fused.

    sums      lists of tables: seconds of a run, or those of computing and those of talking
    holdings  what is held when, where that has a limit
    """

    def __init__(
        self,
        graph: gs.Graph,
        sharding: ShardingState,
        states: Sequence[tuple[str, str]] = (),
        kept: Kept | None = None,
        objective: Objective | None = None,
        step: Step | None = None,
    ) -> None:
        self.sharding = sharding
        self.kept = kept
        self.objective = objective = objective or Objective()
        known = sharding.factors.tensors
        self.after = {a: b for a, b in states if a in known and b in known}
        self.states = {after: before for before, after in self.after.items()}
        self.outputs = {t.name for t in graph.outputs}
        self.makers: dict[str, _Port] = {}
        self.readers: dict[str, list[_Port]] = defaultdict(list)
        self.known: dict[Hashable, Array] = {}
        self.fused = GradientSums.of(graph, step, sharding.costs)
        self.known_fused: dict[Hashable, Array] = {}
        self.times = repetitions(graph.nodes)
        self.weights = {t.name for t in constants(graph)} - sharding.pinned
        self.kinds = partial_kinds(sharding.factors.ops)
        self.classes = self._classes()
        self.known_choices: dict[str, list[OpStrategy]] = {}
        for op in sharding.factors.ops:
            self._add_ports(op)
        profiles = max((len(t.costed) for t in known.values()), default=1)
        most = MOST_CHOICES
        while True:
            self.holdings = MemoryTimeline(graph, profiles)
            self._plan(most)
            largest = max(map(len, self.choices.values()), default=1)
            if self.tables.entries <= MOST_ENTRIES or largest <= FEWEST_CHOICES:
                break
            share = 0.9 * math.sqrt(MOST_ENTRIES / self.tables.entries)  # mostly over pairs
            most = max(int(min(share, LESS) * largest), FEWEST_CHOICES)
        self.tables.make()

    @property
    def sizes(self) -> list[int]:
        """How many values each variable has."""
        return self.tables.sizes

    @property
    def sums(self) -> list[list[Table]]:
        """Lists of tables."""
        return self.tables.tables

    @property
    def _is_apart(self) -> bool:
        return self.objective.goal == THROUGHPUT

    def _plan(self, most: int) -> None:
        """Adds all variables and tables, which are not made yet; a node has at most so many
        choices."""
        self.tables = Sums(2 if self._is_apart else 1)
        self.choices: dict[str, list[OpStrategy]] = {}
        self.held: dict[Hashable, ShardingDomain] = {}
        self.ends: dict[Hashable, ShardingDomain] = {}
        for alike in self.classes:
            self._add_nodes(alike, most)
        tensors = {t.name: t for op in self.sharding.factors.ops for t, _ in op.operands()}
        groups: dict[tuple[bool, Hashable], list[gs.Tensor]] = defaultdict(list)
        for name, tensor in tensors.items():
            if name in self.sharding.factors.tensors:
                groups[name in self.weights, self._key(name)].append(tensor)
        for (is_weight, _), found in groups.items():
            if not is_weight:
                self._add_tensor(found)
            elif self.objective.memory is not None:
                self._add_weight(found)

    def solve(
        self, exhaustively: bool = False
    ) -> tuple[float, dict[str, OpStrategy], dict[str, FactorSharding]]:
        """The least seconds of a run, the choice for each node by name, and how states are held;
        where nodes depend on each other too much for that, few seconds. Errors: TooLarge where all
        strategies are to be tried, and there are too many; TooMuch and Undecided where nothing is
        found within the limit."""
        most = self.objective.memory
        limit = Limit(most or 1.0, self.holdings.steps, self.holdings.demands)
        if exhaustively:
            seconds, values = exhaust_within(self.sizes, self.sums, limit)
        elif most is None and not self._is_apart:
            seconds, values, _ = self._minimum(self.sums[0])
        else:
            objective = self.objective
            seconds, values = minimize_within(
                self.sizes, self.sums, limit, self._minimum, objective.patience, objective.any_fit
            )
        chosen = {n: self.choices[n][values[v]] for n, v in self.variable.items()}
        states = {n: self._fed(n) for n in self.states.values()}
        held = {
            name: end.factor_shardings[0 if end.variable is None else values[end.variable]]
            for name, end in states.items()
        }
        return seconds, chosen, held

    def _minimum(self, tables: Sequence[Table]) -> tuple[float, list[int], bool]:
        """A small sum of tables over the variables, and whether it is the least."""
        try:
            return *minimize(self.sizes, tables), True
        except TooLarge:
            return minimize_in_parts(self.sizes, tables, self._start(tables))

    def _start(self, tables: Sequence[Table]) -> dict[int, int]:
        """Values of the nodes' variables that are good where all axes of the mesh split alike, as
        one axis would; the first where there is no such choice, or but one axis."""
        first = dict.fromkeys(self.variable.values(), 0)
        axes = {name for name, size in self.sharding.mesh.shape if size > 1}
        kept = {v: np.arange(size) for v, size in enumerate(self.sizes)}
        for name, v in self.variable.items():
            alike = [c.is_alike(axes) for c in self.choices[name]]
            kept[v] = np.flatnonzero(alike)
        if len(axes) < 2 or not all(map(len, kept.values())):
            return first
        sizes = [len(kept[v]) for v in range(len(self.sizes))]
        _, found, _ = minimize_in_parts(sizes, among(map(diagonal, tables), kept), first)
        return {v: int(kept[v][found[v]]) for v in first}

    def _classes(self) -> list[list[OpFactors]]:
        """Nodes that are one variable, and the variable of each."""
        ops = self.sharding.factors.ops
        classes: dict[int, list[OpFactors]] = defaultdict(list)
        numbers = range(len(ops)) if self.objective.untied else tied(self.sharding, self.kinds)
        for number, op in zip(numbers, ops, strict=True):
            classes[number].append(op)
        found = list(classes.values())
        self.variable = {op.node.name: v for v, alike in enumerate(found) for op in alike}
        return found

    def _add_nodes(self, alike: Sequence[OpFactors], most: int) -> None:
        """The variable of nodes, and what their work takes."""
        op = alike[0]
        choices = self.known_choices.get(op.node.name, [])
        if not choices or len(choices) > most:
            choices = choices_of(op, self.sharding, self.kinds, self.kept, most, self._held_by)
            self.known_choices[op.node.name] = choices
        if not choices:
            raise StrategyError(
                f"{op.node.op} {op.node.name!r} cannot be split over {self.sharding.mesh} as the "
                "strategy asks: a size does not divide, or two entries disagree"
            )
        variable = self.tables.add_variable(len(choices))
        assert variable == self.variable[op.node.name]
        times = sum(self.times[one.node.name] for one in alike)
        self.tables.add([ShardingDomain(variable, ())], lambda: times * self._op_cost(op, choices))
        self.choices.update((one.node.name, choices) for one in alike)

    def _held_by(self, op: OpFactors, choice: OpStrategy) -> float:
        """Bytes of all that a node reads and makes, of the parts of a rank."""
        placed = [(t, choice.operand(op, i)) for i, t in enumerate(op.node.inputs)]
        placed += [(t, choice.result(op, i)) for i, t in enumerate(op.node.outputs)]
        known = self.sharding.factors.tensors
        return sum(mean_bytes(t, at, self.sharding) for t, at in placed if t.name in known)

    def _op_cost(self, op: OpFactors, choices: Sequence[OpStrategy]) -> Array:
        """What the work of a node takes, by choice, as rows."""
        seconds = np.array([op_cost(op, choice, self.sharding) for choice in choices]).T
        seconds[0] += [PASSING * bool(choice.passed) for choice in choices]
        rows: Array = seconds if self._is_apart else seconds.sum(0, keepdims=True)
        return rows

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
            self.readers[tensor.name].append(_Port(op, None, is_whole=True))

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
            self.sharding.tensor_sharding(name) if pinned else None,
            None if maker is None else self._place(maker),
            frozenset(readers.items()),
            (name in self.outputs, name in self.fused.tensors),
            name in self.sharding.factors.fused,
            self._key(self.states[name]) if name in self.states else None,
        )

    def _place(self, port: _Port) -> Hashable:
        if port.is_whole:
            return None
        return self.variable[port.op.node.name], port.index, port.links

    def _add_tensor(self, found: Sequence[gs.Tensor]) -> None:
        """Tables for tensors that are alike, over the variables of the nodes that make and read
        them, and of others."""
        name, times = found[0].name, sum(self._iterations(tensor.name) for tensor in found)
        required = self._required(name)
        maker = self.makers.get(name)
        produced = self._fed(name) if maker is None else self._end(maker, name)
        requested = self._requested(name, produced)
        known = self.known_fused if name in self.fused.tensors else self.known
        sharding = self.fused.within(self.sharding, name)
        reduced = ShardingDomain(None, tuple(p.reduced() for p in requested.factor_shardings))
        reshard_costs = ReshardCosts(
            sharding, found[0], [produced, requested, *required, reduced], known, self._is_apart
        )
        if requested is not produced:
            self.tables.add(
                [produced, requested], lambda: times * reshard_costs.paths(produced, requested)
            )
        at = {end: end for end in (requested, *required)}
        common = None
        if len(required) == 1:
            self.tables.add(
                [requested, *required], lambda: times * reshard_costs.paths(requested, required[0])
            )
        elif required:
            serving = Serving(self.tables, reshard_costs, times, self.objective.memory is not None)
            at, common = serving.serve(requested, required)
        if self.objective.memory is not None:
            lives = [self._life(tensor.name, at) for tensor in found]
            add = self.holdings
            self.tables.later(lambda: add.add_produced(reshard_costs, produced, requested, lives))
            self.tables.later(lambda: add.add_copies(reshard_costs, at[requested], common, lives))

    def _iterations(self, name: str) -> int:
        """How often a tensor is made: where a body is handed it, in each turn."""
        maker = self.makers.get(name)
        if maker is None:
            return 1
        around = self.times[maker.op.node.name]
        return around if maker.index is not None else around * iterations(maker.op.node)

    def _add_weight(self, found: Sequence[gs.Tensor]) -> None:
        """What is held of weights that are alike."""
        name = found[0].name
        required = self._required(name)
        reshard_costs = ReshardCosts(self.sharding, found[0], required, self.known, self._is_apart)
        add = self.holdings.add_weight
        self.tables.later(lambda: add(reshard_costs, required, len(found)))

    def _life(self, name: str, at: Mapping[ShardingDomain, ShardingDomain]) -> LiveRange:
        """When a tensor is there and read, each time by one of these ends."""
        first, last = self.holdings.first, self.holdings.last
        reads = [
            (
                (first if port.index is not None or port.is_whole else last)[port.op.node.name],
                at[self._end(port, name, reads=True)],
            )
            for port in self.readers[name]
        ]
        reads.sort(key=itemgetter(0))
        maker = self.makers.get(name)
        start = 0 if maker is None else first[maker.op.node.name]
        end = max([start, *(step for step, _ in reads)])
        if name in self.outputs or maker is None:
            end = self.holdings.end
        return LiveRange((start, end), reads)

    def _whole(self, name: str) -> FactorSharding:
        return FactorSharding(tuple(() for _ in self.sharding.factors.tensors[name].leaves))

    def _required(self, name: str) -> list[ShardingDomain]:
        """How the readers of a tensor read it, each way once."""
        ends = (self._end(port, name, reads=True) for port in self.readers[name])
        return list(dict.fromkeys(ends))

    def _end(self, port: _Port, tensor: str, reads: bool = False) -> ShardingDomain:
        """How a tensor is at a port, by the node's choice."""
        if port.is_whole:
            return ShardingDomain(None, (self._whole(tensor),))
        key = self._place(port), reads
        if key not in self.ends:
            name = port.op.node.name
            placed = port.needed if reads else port.produced
            factor_shardings = tuple(placed(c) for c in self.choices[name])
            is_one = len(set(factor_shardings)) == 1
            one = ShardingDomain(None, factor_shardings[:1])
            self.ends[key] = (
                one if is_one else ShardingDomain(self.variable[name], factor_shardings)
            )
        return self.ends[key]

    def _fed(self, name: str) -> ShardingDomain:
        """What is fed, and what a state is, is as it suits: a variable of its own."""
        if name in self.sharding.pinned:
            return ShardingDomain(None, (self.sharding.tensor_sharding(name),))
        key = self._key(name)
        if key not in self.held:
            factor_shardings = [
                p for end in self._required(name) for p in end.factor_shardings if not p.partial
            ]
            if name in self.after:
                factor_shardings = [self._as_state(p, name, name) for p in factor_shardings]
            candidates = tuple(dict.fromkeys((self._whole(name), *factor_shardings)))
            self.held[key] = ShardingDomain(self.tables.add_variable(len(candidates)), candidates)
        return self.held[key]

    def _requested(self, name: str, produced: ShardingDomain) -> ShardingDomain:
        """How a tensor is before anything reads it: as is asked for, as the state that it becomes,
        with nothing pending where it is a result of the graph, else as it is made."""
        if name in self.sharding.pinned:
            return ShardingDomain(None, (self.sharding.tensor_sharding(name),))
        if name in self.states:
            state = self._fed(self.states[name])
            held = (self._as_state(p, self.states[name], name) for p in state.factor_shardings)
            return ShardingDomain(state.variable, tuple(held))
        if name in self.outputs:
            return ShardingDomain(
                produced.variable, tuple(p.reduced() for p in produced.factor_shardings)
            )
        return produced

    def _as_state(self, factor_sharding: FactorSharding, source: str, name: str) -> FactorSharding:
        """A placement of the input of a state pair as one of either end."""
        result = self.after[source]
        return FactorSharding(
            self.sharding.state_leaves(factor_sharding.leaves, source, result, name)
        )
