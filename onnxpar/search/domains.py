"""The factor shardings that tensors can have, depending on the strategies of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

from onnxpar.search.op_strategies import OpStrategy
from onnxpar.search.ports import Port, Ports
from onnxpar.search.reshard_costs import ShardingDomain
from onnxpar.search.sums import Sums
from onnxpar.sharding.state import FactorSharding, ShardingState


class States:
    """State pairs among the known tensors: `results` by input, and `inputs` by result."""

    def __init__(self, pairs: Sequence[tuple[str, str]], known: Collection[str]) -> None:
        self.results = {a: b for a, b in pairs if a in known and b in known}
        self.inputs = {result: source for source, result in self.results.items()}


class Tensors:
    """The tensors of a graph: where they are produced and read, and which of them are alike.

    variable  the variable of each node, by its name
    outputs   the results of the graph
    fused     sums over ranks that are fused into buckets
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
        """Equal for tensors that share one table: those with the same factors, produced and read at
        the same places."""
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
        """Equal for ports of nodes of the same variable."""
        if port.is_whole:
            return None
        return self.variable[port.op.node.name], port.index, port.links


class Domains:
    """The domain of each tensor, where it is produced and where it is read; `strategies` are those
    of each node, by name. Inputs and states have variables of their own, added to `sums`."""

    def __init__(
        self, tensors: Tensors, strategies: Mapping[str, Sequence[OpStrategy]], sums: Sums
    ) -> None:
        self.tensors, self.strategies, self.sums = tensors, strategies, sums
        self.sharding, self.states = tensors.sharding, tensors.states
        self._at_ports: dict[Hashable, ShardingDomain] = {}
        self._inputs: dict[Hashable, ShardingDomain] = {}

    def produced(self, name: str) -> ShardingDomain:
        """The domain in which a node produces the tensor; that of an input if no node does."""
        producer = self.tensors.ports.producers.get(name)
        return self.input(name) if producer is None else self._at(producer, name, reads=False)

    def required(self, name: str) -> list[ShardingDomain]:
        """The different domains in which nodes read the tensor."""
        readers = self.tensors.ports.readers[name]
        return list(dict.fromkeys(self.read(port, name) for port in readers))

    def read(self, port: Port, name: str) -> ShardingDomain:
        """The domain in which one node reads the tensor."""
        return self._at(port, name, reads=True)

    def input(self, name: str) -> ShardingDomain:
        """The domain of an input or state: any sharding that a reader requires, by a variable of
        its own, unless a layout was requested."""
        if name in self.sharding.pinned:
            return ShardingDomain(None, (self.sharding.tensor_sharding(name),))
        key = self.tensors.signature(name)
        if key not in self._inputs:
            wanted = [p for d in self.required(name) for p in d.factor_shardings if not p.partial]
            if name in self.states.results:
                wanted = [self._as_state(p, name, name) for p in wanted]
            candidates = tuple(dict.fromkeys((self._whole(name), *wanted)))
            variable = self.sums.add_variable(len(candidates))
            self._inputs[key] = ShardingDomain(variable, candidates)
        return self._inputs[key]

    def requested(self, name: str, produced: ShardingDomain) -> ShardingDomain:
        """The domain of a tensor before anything reads it: the requested layout, that of the state
        that it becomes, the reduced sharding if it is a result of the graph, or else as it is
        produced."""
        if name in self.sharding.pinned:
            return ShardingDomain(None, (self.sharding.tensor_sharding(name),))
        if name in self.states.inputs:
            source = self.states.inputs[name]
            state = self.input(source)
            each = (self._as_state(p, source, name) for p in state.factor_shardings)
            return ShardingDomain(state.variable, tuple(each))
        if name in self.tensors.outputs:
            return produced.reduced()
        return produced

    def _at(self, port: Port, tensor: str, reads: bool) -> ShardingDomain:
        if port.is_whole:
            return ShardingDomain(None, (self._whole(tensor),))
        key = self.tensors.place(port), reads
        if key not in self._at_ports:
            node = port.op.node.name
            sharding_of = port.required if reads else port.produced
            each = tuple(sharding_of(strategy) for strategy in self.strategies[node])
            is_one = len(set(each)) == 1
            self._at_ports[key] = (
                ShardingDomain(None, each[:1])
                if is_one
                else ShardingDomain(self.tensors.variable[node], each)
            )
        return self._at_ports[key]

    def _whole(self, name: str) -> FactorSharding:
        return FactorSharding(tuple(() for _ in self.sharding.factors.tensors[name].leaves))

    def _as_state(self, factor_sharding: FactorSharding, source: str, name: str) -> FactorSharding:
        """The sharding of `name`, which is the input `source` of a state pair or its result, if
        `source` has this one."""
        result = self.states.results[source]
        return FactorSharding(
            self.sharding.state_leaves(factor_sharding.leaves, source, result, name)
        )
