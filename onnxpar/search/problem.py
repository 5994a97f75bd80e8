"""The search for a strategy on one mesh, as the minimum of a sum of tables.

A variable is the strategy of a node. Each node has a table with its cost, and each tensor has one
with the cost of the reshards between the node that produces it and the nodes that read it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.base.errors import StrategyError
from onnxpar.graph.paged_attention import written_in_place
from onnxpar.graph.repetitions import iterations, repetitions
from onnxpar.graph.subgraphs import constants
from onnxpar.graph.training_spec import Step
from onnxpar.search.domains import Domains, States, Tensors
from onnxpar.search.gradient_sums import GradientSums
from onnxpar.search.known import Known
from onnxpar.search.known_compute import KnownCompute
from onnxpar.search.memory_timeline import (
    LiveRange,
    MemoryTimeline,
    weight_bytes,
    weight_scopes,
)
from onnxpar.search.objective import THROUGHPUT, Objective
from onnxpar.search.op_strategies import (
    Kept,
    OpStrategy,
    combinations_of,
    partial_kinds,
    strategies_of,
)
from onnxpar.search.repeats import numbered, signs
from onnxpar.search.reshard_costs import Holders, ReshardCosts, ShardingDomain
from onnxpar.search.shared_reshards import Serving
from onnxpar.search.solver.column_generation import minimize_within
from onnxpar.search.solver.elimination import Table, TooLarge, minimize
from onnxpar.search.solver.limits import Limit, exhaust_within
from onnxpar.search.solver.pruning import minimize_in_parts
from onnxpar.search.starts import AlongAxes
from onnxpar.search.sums import Sums
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState

MOST_STRATEGIES, FEWEST_STRATEGIES = 1 << 12, 1 << 3
"""Most strategies of a node that the search compares. If tables would have more than MOST_ENTRIES
entries, it compares fewer, but at least FEWEST_STRATEGIES."""
MOST_ENTRIES = 20 << 20
"""Most entries of all tables of a sum: 160 MB. Elimination and message passing need several times
as much memory."""
LESS = 0.75
"""The largest share of the strategies that remains when their number is reduced once."""
SURE = 1e-3
"""The share by which the lower bound `floor` must exceed `below`, so that the search gives up a
mesh."""
PASSING = 1e-12
"""Seconds added to the cost of a node that passes a partial sum on, so that the search chooses to
do so only if that saves time."""


@dataclass(frozen=True)
class Found:
    """A solution of the search on one mesh.

    seconds  of a run
    bound    a lower bound on the seconds of every strategy
    chosen   the strategy of each node, by name
    inputs   the sharding of each state, by the name of its input
    """

    seconds: float
    bound: float
    chosen: dict[str, OpStrategy]
    inputs: dict[str, FactorSharding]


class Problem:
    """The decisions of a strategy for a graph, as variables, and its cost, as sums of tables over
    these. Nodes in the same place of repeated blocks share a variable; the tensors between them
    share a table, multiplied by their number.

    The arguments:

    states   the state pairs, (input, output)
    kept     decisions of another search
    step     the roles of inputs and outputs of a training step, in which sums of gradients over
             ranks have the cost of fused sums
    decided  the strategies of nodes that have no choice, by name
    below    if the nodes' own costs say that no strategy takes less than so many seconds, the
             tables of tensors are not computed

    Attributes that `solve` reads:

    sums        a list of tables for the seconds of a run; or, for the objective throughput, one for
                the seconds of compute, and one for the seconds of communication
    timeline    memory that a rank has in use at each step, if it is limited
    strategies  the strategies that each node can have, by name
    variable    the variable of each node, by name
    in_place    results that overwrite their state, and so take no memory of their own
    floor       a lower bound on the seconds of every strategy, from the nodes' own costs
    """

    def __init__(
        self,
        graph: gs.Graph,
        sharding: ShardingState,
        states: Sequence[tuple[str, str]] = (),
        kept: Kept | None = None,
        objective: Objective | None = None,
        step: Step | None = None,
        decided: Mapping[str, OpStrategy] | None = None,
        below: float = math.inf,
    ) -> None:
        self.sharding = sharding
        self.below = below
        self.decided = decided or {}
        self.kept = kept
        self.objective = objective or Objective()
        self.gradients = GradientSums.of(graph, step, sharding.costs, self.objective.hides_sums)
        shared = Known() if sharding.parts else self.objective.known
        self.known = shared.on(sharding.costs)
        self.reshards = self.known.tables(None, self._is_apart)
        self.reshards_of_gradients = self.known.tables(self.gradients.costs, self._is_apart)
        self.times = repetitions(graph.nodes)
        self.weights = {t.name for t in constants(graph)} - sharding.pinned
        self.kinds = partial_kinds(sharding.factors.ops)
        self.signs = signs(sharding, self.kinds, shared.signs)
        self.classes = self._classes()
        self.variable = {op.node.name: v for v, alike in enumerate(self.classes) for op in alike}
        self.tensors = Tensors(
            sharding,
            States(states, sharding.factors.tensors),
            {t.name for t in graph.outputs},
            self.gradients.tensors,
            self.variable,
        )
        in_place = written_in_place(graph, states)
        self.in_place = {result for source, result in states if source in in_place}
        self._build_small_enough(graph)

    @cached_property
    def is_complete(self) -> bool:
        """False if some node has more combinations of splits than are compared."""
        return all(self._combinations(alike[0]) <= self.most for alike in self.classes)

    def _combinations(self, op: OpFactors) -> int:
        """Returns the number of combinations of splits of a node."""
        key, known = self._key(op), self.known.combinations
        if key not in known:
            known[key] = combinations_of(op, self.sharding, self.kinds, self.kept)
        return known[key]

    def _key(self, op: OpFactors) -> Hashable:
        """Returns a key that is equal for nodes with the same strategies and costs."""
        return self.sign[op.node.name], self.kept and self.kept.strategies[op.node.name]

    @property
    def sizes(self) -> list[int]:
        """The number of values of each variable: of strategies of its nodes."""
        return self.tables.sizes

    @property
    def sums(self) -> list[list[Table]]:
        """The list of tables of each sum."""
        return self.tables.tables

    @property
    def _is_apart(self) -> bool:
        """True if seconds of compute and of communication are summed separately."""
        return self.objective.goal == THROUGHPUT

    def solve(self, exhaustively: bool = False) -> Found:
        """Returns the decisions with the least seconds of a run. If nodes depend on each other too
        much, the seconds are low but maybe not the least; if no strategy takes less than `below`,
        they may also be infinite. `exhaustively` tries every strategy.

        Errors: TooLarge if there are too many strategies to try exhaustively; TooMuch or Undecided
        if no strategy was found within the limit on memory.
        """
        most, below = self.objective.memory, self.below
        if self.is_given_up:
            return Found(math.inf, self.floor, {}, {})
        limit = Limit(most or 1.0, self.timeline.steps, self.timeline.demands)
        if exhaustively:
            seconds, values = exhaust_within(self.sizes, self.sums, limit)
            bound = seconds
        elif most is None and not self._is_apart:
            seconds, values, bound = self._minimum(self.sums[0], below)
        else:
            goal = self.objective
            how = goal.patience, goal.any_fit, below
            seconds, values, bound = minimize_within(
                self.sizes, self.sums, limit, self._minimum, *how
            )
        if math.isinf(seconds):
            return Found(seconds, bound, {}, {})
        chosen = {n: self.strategies[n][values[v]] for n, v in self.variable.items()}
        states = {n: self.domains.input(n) for n in self.tensors.states.inputs.values()}
        inputs = {
            name: domain.factor_shardings[0 if domain.variable is None else values[domain.variable]]
            for name, domain in states.items()
        }
        return Found(seconds, bound, chosen, inputs)

    def least_states(self) -> float:
        """Returns the bytes of all states on a rank, each in the sharding with the fewest bytes."""
        states = self.tensors.states.results.keys() - {*self.objective.on_host}
        read = {t.name: t for op in self.sharding.factors.ops for t, _ in op.operands()}
        return sum(
            min(mean_bytes(tensor, p, self.sharding) for p in self.domains.input(name).distinct)
            for name, tensor in read.items()
            if name in states
        )

    def _minimum(
        self, tables: Sequence[Table], below: float = math.inf
    ) -> tuple[float, list[int], float]:
        """Returns (a low sum of tables, the values of the variables that give it, a lower bound on
        every sum). The search ends when no sum can be lower than `below`."""
        try:
            seconds, values = minimize(self.sizes, tables)
            return seconds, values, seconds
        except TooLarge:
            return minimize_in_parts(self.sizes, tables, self._start, below)

    @cached_property
    def _start(self) -> AlongAxes:
        """A function that finds good values of the nodes' variables to start with."""
        kept = self.kept.axes if self.kept else ()
        axes = [n for n, size in self.sharding.mesh.shape if size > 1 and n not in kept]
        return AlongAxes({v: self.strategies[n] for n, v in self.variable.items()}, axes)

    def _classes(self) -> list[list[OpFactors]]:
        """Returns, for each variable, the nodes that share it."""
        ops = self.sharding.factors.ops
        classes: dict[int, list[OpFactors]] = defaultdict(list)
        numbers = range(len(ops)) if self.objective.untied else numbered(self.signs)
        for number, op in zip(numbers, ops, strict=True):
            classes[number].append(op)
        return list(classes.values())

    def _build_small_enough(self, graph: gs.Graph) -> None:
        """Builds the tables, with fewer strategies per node if the tables would be too large."""
        profiles = max((len(t.costed) for t in self.sharding.factors.tensors.values()), default=1)
        self.holders = Holders(self._holders(), profiles)
        names = (op.node.name for op in self.sharding.factors.ops)
        self.sign = dict(zip(names, self.signs, strict=True))
        self.reduced: dict[Hashable, list[OpStrategy]] = {
            (self.sign[name], None): [strategy] for name, strategy in self.decided.items()
        }
        most = MOST_STRATEGIES
        while True:
            self.timeline = MemoryTimeline(graph, profiles * len(self.holders.ranks))
            self._add_all(most)
            largest = max(map(len, self.strategies.values()), default=1)
            if self.tables.entries <= MOST_ENTRIES or largest <= FEWEST_STRATEGIES:
                break
            share = 0.9 * math.sqrt(
                MOST_ENTRIES / self.tables.entries
            )  # most tables are over pairs
            most = max(int(min(share, LESS) * largest), FEWEST_STRATEGIES)
        self.most = most
        self.floor = 0.0 if math.isinf(self.below) else self._least_of_nodes()
        if not self.is_given_up:
            self.tables.make()

    @property
    def is_given_up(self) -> bool:
        """True if no strategy on this mesh can be fast enough: `floor`, the lower bound, exceeds
        `below`, the seconds to be undercut, by a clear margin. The margin is needed because `below`
        may be a little less than the seconds of the best mesh so far."""
        return self.floor * (1 - SURE) >= self.below

    def _least_of_nodes(self) -> float:
        """Returns the seconds of all nodes if each had the strategy that is best for it alone,
        without reshards."""
        total: Array = np.zeros(len(self.sums))
        for alike in self.classes:
            times = sum(self.times[op.node.name] for op in alike)
            costs = self._op_cost(alike[0], self.strategies[alike[0].node.name])
            total += times * costs.min(axis=1)
        return float(total.max())

    def _holders(self) -> tuple[tuple[int | None, float], ...]:
        """Returns (rank, weight of its bytes) for the ranks whose memory may differ: one of several
        ranks with the same weight and the same shares along every axis."""
        objective, costs = self.objective, self.sharding.costs
        if objective.memory is None or not (objective.memories or costs.topology.shares):
            return Holders().ranks
        mesh = self.sharding.mesh
        shares = [
            (split.weights, costs.places((axis,)))
            for name, _ in mesh.shape
            if (split := costs.shares((axis := mesh.axis(name),))) is not None
        ]
        kinds: dict[Hashable, tuple[int, float]] = {}
        for rank in range(mesh.size):
            weight = objective.weight_of(rank)
            own = tuple(weights[places[rank]] for weights, places in shares)
            own_share = costs.topology.shares[rank] if costs.topology.shares else None
            kinds.setdefault((weight, own_share, own), (rank, weight))
        return tuple(kinds.values())

    def _add_all(self, most: int) -> None:
        """Adds all variables and tables, which are not computed yet; a node has at most `most`
        strategies."""
        self.tables = Sums(2 if self._is_apart else 1)
        self.strategies: dict[str, list[OpStrategy]] = {}
        self.domains = Domains(self.tensors, self.strategies, self.tables)
        for alike in self.classes:
            self._add_nodes(alike, most)
        tensors = {t.name: t for op in self.sharding.factors.ops for t, _ in op.operands()}
        groups: dict[tuple[bool, Hashable], list[gs.Tensor]] = defaultdict(list)
        for name, tensor in tensors.items():
            if name in self.sharding.factors.tensors:
                groups[name in self.weights, self.tensors.signature(name)].append(tensor)
        for (is_weight, _), group in groups.items():
            held = [tensor for tensor in group if tensor.name not in self.objective.on_host]
            if not is_weight:
                self._add_tensor(group)
            elif held:
                self._add_weight(held)

    def _add_nodes(self, alike: Sequence[OpFactors], most: int) -> None:
        """Adds the variable of the nodes `alike`, which share it, and the table of their cost.
        Errors: StrategyError if they have no strategy."""
        op = alike[0]
        strategies = self._strategies(op, most)
        if not strategies:
            raise StrategyError(
                f"{op.node.op} {op.node.name!r} cannot be split over {self.sharding.mesh} as "
                "requested: a size does not divide, or two entries of the strategy contradict each "
                "other; request fewer splits of it, or give another mesh"
            )
        variable = self.tables.add_variable(len(strategies))
        assert variable == self.variable[op.node.name]
        times = sum(self.times[one.node.name] for one in alike)
        own = [ShardingDomain(variable, ())]
        self.tables.add(own, lambda: times * self._op_cost(op, strategies))
        self.strategies.update((one.node.name, strategies) for one in alike)

    def _strategies(self, op: OpFactors, most: int) -> list[OpStrategy]:
        """Returns the strategies of a node: all, or at most about `most`."""
        key = self._key(op)
        known = self.reduced if key in self.reduced else self.known.strategies
        if key not in known or len(known[key]) > most:
            known = self.known.strategies if most == MOST_STRATEGIES else self.reduced
            known[key] = strategies_of(
                op, self.sharding, self.kinds, self.kept, most, self._rank_bytes
            )
        return known[key]

    def _rank_bytes(self, op: OpFactors, strategy: OpStrategy) -> float:
        """Returns the bytes of a rank's shards of a node's operands and results."""
        each = [(t, strategy.operand(op, i)) for i, t in enumerate(op.node.inputs)]
        each += [(t, strategy.result(op, i)) for i, t in enumerate(op.node.outputs)]
        known = self.sharding.factors.tensors
        return sum(mean_bytes(t, p, self.sharding) for t, p in each if t.name in known)

    def _op_cost(self, op: OpFactors, strategies: Sequence[OpStrategy]) -> Array:
        """Returns the seconds of a node under each strategy (columns), with a row for each sum."""
        seconds = self.known.op_costs(strategies, lambda: self._op_costs(op, strategies))
        rows: Array = seconds if self._is_apart else seconds.sum(0, keepdims=True)
        return rows

    def _op_costs(self, op: OpFactors, strategies: Sequence[OpStrategy]) -> Array:
        """Returns two rows, seconds of compute and of communication, with a column for each
        strategy."""
        known = KnownCompute(op, self.sharding, self.sign[op.node.name], self.known.compute)
        seconds: Array = np.array([known.cost(strategy) for strategy in strategies]).T
        seconds[0] += [PASSING * bool(strategy.passed) for strategy in strategies]
        return seconds

    def _add_tensor(self, alike: Sequence[gs.Tensor]) -> None:
        """Adds the tables for the reshards of tensors with one signature, over the variables of the
        nodes that produce and read them; also further variables that these tables need."""
        name, times = alike[0].name, sum(self._iterations(tensor.name) for tensor in alike)
        required = self.domains.required(name)
        produced = self.domains.produced(name)
        requested = self.domains.requested(name, produced)
        is_gradient = name in self.gradients.tensors
        costs = ReshardCosts(
            self.gradients.within(self.sharding, name),
            alike[0],
            [
                *(p for domain in (produced, requested, *required) for p in domain.distinct),
                *(p.reduced() for p in requested.distinct),
            ],
            self.reshards_of_gradients if is_gradient else self.reshards,
            self._is_apart,
            self.holders,
        )
        states = sum(tensor.name in self.tensors.states.results for tensor in alike)
        if states and self._holding_price:
            price = states * self._holding_price
            self.tables.add([produced], partial(self._holding, costs, [produced], price))
        if requested is not produced:
            self.tables.add([produced, requested], lambda: times * costs.paths(produced, requested))
        at = {domain: domain for domain in (requested, *required)}
        common = None
        if len(required) == 1:
            self.tables.add(
                [requested, *required], lambda: times * costs.paths(requested, required[0])
            )
        elif required:
            serving = Serving(self.tables, costs, times, self.objective.memory is not None)
            at, common = serving.serve(requested, required)
        if self.objective.memory is not None:
            unheld = {*self.objective.on_host, *self.in_place}
            held = [tensor for tensor in alike if tensor.name not in unheld]
            ranges = [self._live_range(tensor.name, at) for tensor in held]
            add = self.timeline
            self.tables.later(lambda: add.add_produced(costs, produced, requested, ranges))
            self.tables.later(lambda: add.add_copies(costs, at[requested], common, ranges))

    def _iterations(self, name: str) -> int:
        """Returns how often a tensor is produced in a run; an input of a body counts once for each
        iteration."""
        producer = self.tensors.ports.producers.get(name)
        if producer is None:
            return 1
        around = self.times[producer.op.node.name]
        return around if producer.index is not None else around * iterations(producer.op.node)

    def _add_weight(self, alike: Sequence[gs.Tensor]) -> None:
        """Adds the memory of weights with one signature, and the cost of having them in memory."""
        price = self._holding_price
        if self.objective.memory is None and not price:
            return
        required = self.domains.required(alike[0].name)
        shardings = [p for domain in required for p in domain.distinct]
        costs = ReshardCosts(self.sharding, alike[0], shardings, None, self._is_apart, self.holders)
        if self.objective.memory is not None:
            add = self.timeline.add_weight
            self.tables.later(lambda: add(costs, required, len(alike)))
        for scope in weight_scopes(required) if price else ():
            self.tables.add(scope, partial(self._holding, costs, scope, price * len(alike)))

    @property
    def _holding_price(self) -> float:
        """The cost of having a byte of a weight or a state in memory, in seconds."""
        read = self.sharding.costs.memory(1 << 30, far=1 << 30) / (1 << 30)
        return self.objective.holding * read

    def _holding(self, costs: ReshardCosts, scope: Sequence[ShardingDomain], price: float) -> Array:
        """Returns the table of the cost of having a weight or a state in memory, for each sum.
        `price` is the cost of a byte."""
        most = price * weight_bytes(costs, scope).max(0)
        return np.broadcast_to(most, (2 if self._is_apart else 1, *most.shape))

    def _live_range(self, name: str, at: Mapping[ShardingDomain, ShardingDomain]) -> LiveRange:
        """Returns the steps at which a tensor exists and is read. `at` maps the domains of readers
        to the domains that tables use for them."""
        first, last = self.timeline.first, self.timeline.last
        reads = [
            (
                (first if port.index is not None or port.is_whole else last)[port.op.node.name],
                at[self.domains.read(port, name)],
            )
            for port in self.tensors.ports.readers[name]
        ]
        reads.sort(key=itemgetter(0))
        producer = self.tensors.ports.producers.get(name)
        start = 0 if producer is None else first[producer.op.node.name]
        end = max([start, *(step for step, _ in reads)])
        if name in self.tensors.outputs or producer is None:
            end = self.timeline.end
        return LiveRange((start, end), reads)
