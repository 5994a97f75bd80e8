"""Which shardings each tensor can have where a node produces it, and where nodes read it, as
functions of the strategies of these nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

from onnxpar.search.op_strategies import OpStrategy
from onnxpar.search.ports import Port, Ports, PortShardings
from onnxpar.search.reshard_costs import ShardingDomain
from onnxpar.search.sums import Sums
from onnxpar.sharding.state import FactorSharding, ShardingState


class States:
    """The state pairs both of whose tensors are known. `results` maps the input of a pair to its
    result, `inputs` maps results to inputs."""

    def __init__(self, pairs: Sequence[tuple[str, str]], known: Collection[str]) -> None:
        self.results = {a: b for a, b in pairs if a in known and b in known}
        self.inputs = {result: source for source, result in self.results.items()}


class Tensors:
    """The tensors of a graph: which nodes produce and read them, and which tensors are so equal
    that the search has one table for all of them.

    sharding  the axes that are decided already
    states    the state pairs
    outputs   names of the outputs of the graph
    fused     names of tensors whose sums over ranks are fused into buckets
    variable  the variable of each node in the search, by the node's name
    """

    def __init__(
        self,
        sharding: ShardingState,
        states: States,
        outputs: Collection[str],
        fused: Collection[str],
        variable: Mapping[str, int],
    ) -> None:
        self.sharding, self.states = sharding, states
        self.outputs, self.fused = outputs, fused
        self.variable = variable
        self.ports = Ports(sharding.factors.ops)

    def signature(self, name: str) -> Hashable:
        """Returns a key that is equal for tensors that can share one table: they have equal
        factors, and are produced and read at the same operands and results of nodes with the same
        variables."""
        factors = self.sharding.factors.tensors[name]
        sizes = tuple(leaf.size for leaf in factors.leaves)
        producer = self.ports.producers.get(name)
        readers = Counter(map(self.place, self.ports.readers[name]))
        pinned = name in self.sharding.pinned
        states = self.states.inputs
        return (
            (factors.dims, factors.dim_of_leaf, factors.apart, sizes),
            self.sharding.tensor_sharding(name) if pinned else None,
            None if producer is None else self.place(producer),
            frozenset(readers.items()),
            (name in self.outputs, name in self.fused),
            name in self.sharding.factors.fused,
            self.signature(states[name]) if name in states else None,
        )

    def place(self, port: Port) -> Hashable:
        """Returns a key for an operand or result of a node; equal for the operands (or results) of
        one index if their nodes share a variable."""
        if port.is_whole:
            return None
        return self.variable[port.op.node.name], port.index, port.links


class Domains:
    """The domain of each tensor (its sharding for each value of a variable), where it is produced
    and where it is read.

    strategies  the strategies of each node, by name
    sums        gets a variable for each input and state, which no node's strategy decides
    """

    def __init__(
        self, tensors: Tensors, strategies: Mapping[str, Sequence[OpStrategy]], sums: Sums
    ) -> None:
        self.tensors, self.strategies, self.sums = tensors, strategies, sums
        self.sharding, self.states = tensors.sharding, tensors.states
        self._at_ports: dict[Hashable, ShardingDomain] = {}
        self._inputs: dict[Hashable, ShardingDomain] = {}
        self._shardings: dict[Hashable, tuple[FactorSharding, ...]] = {}
        self._of_ports: dict[int, PortShardings] = {}

    def produced(self, name: str) -> ShardingDomain:
        """Returns the domain of a tensor as a node produces it; of an input of the graph,
        `input`."""
        producer = self.tensors.ports.producers.get(name)
        return self.input(name) if producer is None else self._at(producer, name, reads=False)

    def required(self, name: str) -> list[ShardingDomain]:
        """Returns the domains of a tensor as nodes read it, without repetitions."""
        readers = self.tensors.ports.readers[name]
        return list(dict.fromkeys(self.read(port, name) for port in readers))

    def read(self, port: Port, name: str) -> ShardingDomain:
        """Returns the domain of a tensor as one node reads it."""
        return self._at(port, name, reads=True)

    def input(self, name: str) -> ShardingDomain:
        """Returns the domain of an input or state: its own variable chooses among the shardings
        that nodes require, unless a layout was requested."""
        if name in self.sharding.pinned:
            return ShardingDomain(None, (self.sharding.tensor_sharding(name),))
        key = self.tensors.signature(name)
        if key not in self._inputs:
            wanted = [p for d in self.required(name) for p in d.distinct if not p.partial]
            if name in self.states.results:
                wanted = [self._as_state(p, name, name) for p in wanted]
            candidates = tuple(dict.fromkeys((self._whole(name), *wanted)))
            variable = self.sums.add_variable(len(candidates))
            self._inputs[key] = ShardingDomain(variable, candidates)
        return self._inputs[key]

    def requested(self, name: str, produced: ShardingDomain) -> ShardingDomain:
        """Returns the domain of a tensor before nodes read it: the requested layout if there is
        one; if the tensor becomes a state, the sharding of that state; if it is an output of the
        graph, its sharding after the reduction of partial sums; else `produced`."""
        if name in self.sharding.pinned:
            return ShardingDomain(None, (self.sharding.tensor_sharding(name),))
        if name in self.states.inputs:
            source = self.states.inputs[name]
            state = self.input(source)
            return state.mapped([self._as_state(p, source, name) for p in state.distinct])
        if name in self.tensors.outputs:
            return produced.reduced()
        return produced

    def _at(self, port: Port, tensor: str, reads: bool) -> ShardingDomain:
        """The domain of a tensor at an operand (`reads`) or result of a node."""
        if port.is_whole:
            return ShardingDomain(None, (self._whole(tensor),))
        key = self.tensors.place(port), reads
        if key not in self._at_ports:
            node = port.op.node.name
            each = self._each(port, reads)
            is_one = len(set(each)) == 1
            self._at_ports[key] = (
                ShardingDomain(None, each[:1])
                if is_one
                else ShardingDomain(self.tensors.variable[node], each)
            )
        return self._at_ports[key]

    def _each(self, port: Port, reads: bool) -> tuple[FactorSharding, ...]:
        """Returns the sharding of the tensor at an operand (`reads`) or result, for each strategy
        of its node. Nodes that share a list of strategies have equal signatures, and so equal
        shardings."""
        strategies = self.strategies[port.op.node.name]
        key = id(strategies), port.index, port.links, reads
        if key not in self._shardings:
            if id(strategies) not in self._of_ports:
                self._of_ports[id(strategies)] = PortShardings(strategies, port.op)
            self._shardings[key] = self._of_ports[id(strategies)].at(port, reads)
        return self._shardings[key]

    def _whole(self, name: str) -> FactorSharding:
        """The sharding that splits nothing."""
        return FactorSharding(tuple(() for _ in self.sharding.factors.tensors[name].leaves))

    def _as_state(self, factor_sharding: FactorSharding, source: str, name: str) -> FactorSharding:
        """Returns the sharding of `name`, the input or the result of a state pair, that corresponds
        to a sharding of the input `source` of that pair."""
        result = self.states.results[source]
        return FactorSharding(
            self.sharding.state_leaves(factor_sharding.leaves, source, result, name)
        )
