"""Lists all strategies of a node with their costs: compute, communication and memory of a rank, for
a report to the user."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.cost.cost import Costs, bytes_sent
from onnxpar.graph.clone import needed
from onnxpar.graph.repetitions import repetitions
from onnxpar.graph.subgraphs import all_nodes, constants
from onnxpar.graph.tensors import shape_bytes
from onnxpar.graph.training_spec import Step
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.search.gradient_sums import GradientSums
from onnxpar.search.op_cost import op_cost
from onnxpar.search.op_strategies import (
    OpStrategy,
    combinations_of,
    partial_kinds,
    strategies_of,
)
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState


@dataclass(frozen=True)
class Communication:
    """Communication in a run: its seconds, and the bytes that a rank sends; None where the cost
    model gives only seconds."""

    seconds: float = 0.0
    bytes: int | None = 0


@dataclass(frozen=True)
class StrategyCost:
    """A strategy of a node, with its times on the slowest rank, and the bytes of the largest
    shards.

    compute      seconds of compute in a run
    inside       communication inside the node: across a softmax, between neighbours of a window
    result       the all-reduce of the node's result, if that is partial and is reduced right away
    gradients    the all-reduces of the gradients of the node's weights, in a training step
    weights      bytes of the node's weights
    activations  bytes of the node's other operands and of its results
    """

    strategy: OpStrategy
    compute: float
    inside: Communication
    result: Communication
    gradients: Communication
    weights: int
    activations: int

    @property
    def communication(self) -> float:
        """Seconds of all communication in a run."""
        return self.inside.seconds + self.result.seconds + self.gradients.seconds

    @property
    def seconds(self) -> float:
        """Seconds of compute and communication in a run."""
        return self.compute + self.communication


class NodeCosts:
    """Computes the costs of a graph's nodes, as if no layout were decided yet. `most` is the
    largest number of combinations of splits that are tried for a node."""

    def __init__(self, graph: gs.Graph, sharding: ShardingState, step: Step | None, most: int):
        nodes = list(all_nodes(graph))
        self.sharding = ShardingState.open(sharding.mesh, sharding.factors, sharding.costs.topology)
        self.kinds = partial_kinds(sharding.factors.ops)
        self.times = repetitions(graph.nodes)
        self.most = most
        parameters = [slot.input for slot in step.parameters] if step is not None else []
        self.weights = _derived(nodes, [*parameters, *(t.name for t in constants(graph))])
        trained = step.gradients if step is not None else {}
        self.trained = self.weights & _reached(nodes, trained)
        self.forward = {n.name for n in needed(graph, [step.loss])} if step is not None else set()
        self.sums: Costs = (
            GradientSums.of(graph, step, self.sharding.costs).costs or self.sharding.costs
        )

    def of(self, op: OpFactors) -> list[StrategyCost]:
        """Returns the strategies of a node with their costs, the fastest first; of equally fast
        ones, the one that needs fewest bytes."""
        strategies = strategies_of(op, self.sharding, self.kinds, most=self.most, size=self._bytes)
        costs = (self._cost(op, strategy) for strategy in strategies)
        return sorted(costs, key=lambda cost: (cost.seconds, cost.weights + cost.activations))

    def is_complete(self, op: OpFactors) -> bool:
        """False if the node has more combinations of splits than are tried."""
        return combinations_of(op, self.sharding, self.kinds) <= self.most

    def _cost(self, op: OpFactors, strategy: OpStrategy) -> StrategyCost:
        """Returns the cost of a node under one strategy."""
        times = self.times[op.node.name]
        compute, inside = op_cost(op, strategy, self.sharding)
        held = {t.name: self._held(t, at) for t, at in _placed(op, strategy)}
        weights = sum(size for name, size in held.items() if name in self.weights)
        return StrategyCost(
            strategy,
            times * compute,
            Communication(times * inside, None if inside else 0),
            self._result(op, strategy, times),
            self._gradients(op, strategy, times),
            weights,
            sum(held.values()) - weights,
        )

    def _result(self, op: OpFactors, strategy: OpStrategy, times: int) -> Communication:
        """Returns the all-reduces of results that are partial because the node itself reduces. A
        partial sum that the node only passes on counts for the node that produced it."""
        axes, _ = strategy.own_partial(op)
        results = enumerate(op.node.outputs)
        sizes = [self._mean(t, strategy.result(op, i)) for i, t in results] if axes else []
        return _all_reduces(axes, sizes, times, self.sharding.costs)

    def _gradients(self, op: OpFactors, strategy: OpStrategy, times: int) -> Communication:
        """Returns the all-reduces of the gradients of the weights that the node reads in the
        forward pass: over the axes that split the node, but not the weight."""
        seconds, sent = 0.0, 0
        for index, tensor in enumerate(op.node.inputs):
            if tensor.name not in self.trained or op.node.name not in self.forward:
                continue
            at = strategy.operand(op, index)
            used = dict.fromkeys(a for over in (*strategy.axes, strategy.passed) for a in over)
            own = {a for over in (*at.leaves, at.partial) for a in over}
            axes = tuple(a for a in used if a not in own)
            sums = _all_reduces(axes, [self._mean(tensor, at)], times, self.sums)
            seconds, sent = seconds + sums.seconds, sent + (sums.bytes or 0)
        return Communication(seconds, sent)

    def _held(self, tensor: gs.Tensor, at: FactorSharding) -> int:
        """Returns the bytes of the largest shard of a tensor, at the largest of the typical sizes
        for which costs are computed."""
        if tensor.name not in self.sharding.factors.tensors:
            return 0
        return max(
            shape_bytes(tensor, shape) for _, shape in self.sharding.costed_shapes(tensor.name, at)
        )

    def _mean(self, tensor: gs.Tensor, at: FactorSharding) -> float:
        """The mean bytes of a shard of a tensor, over the typical sizes."""
        known = tensor.name in self.sharding.factors.tensors
        return mean_bytes(tensor, at, self.sharding) if known else 0.0

    def _bytes(self, op: OpFactors, strategy: OpStrategy) -> float:
        """The mean bytes of a rank's shards of all operands and results."""
        return sum(self._mean(tensor, at) for tensor, at in _placed(op, strategy))


def _placed(op: OpFactors, strategy: OpStrategy) -> Iterator[tuple[gs.Tensor, FactorSharding]]:
    """Yields (tensor, its sharding) for each operand and result of a node under a strategy."""
    yield from ((t, strategy.operand(op, i)) for i, t in enumerate(op.node.inputs))
    yield from ((t, strategy.result(op, i)) for i, t in enumerate(op.node.outputs))


def _all_reduces(axes: Axes, sizes: Iterable[float], times: int, costs: Costs) -> Communication:
    """Returns the communication of all-reduces, over these axes, of tensors with these sizes in
    bytes, each `times` times."""
    sizes = [size for size in sizes if axes and size]
    ranks = parts_over(axes)
    return Communication(
        times * sum(costs.step("AllReduce", axes, size) for size in sizes),
        times * sum(int(bytes_sent("AllReduce", ranks, size)) for size in sizes),
    )


def _derived(nodes: Sequence[gs.Node], sources: Collection[str]) -> set[str]:
    """Returns the names of the `sources`, and of tensors that nodes compute from these alone."""
    names = set(sources)
    for node in nodes:
        read = [t.name for t in node.inputs if t.name]
        if read and names.issuperset(read):
            names.update(t.name for t in node.outputs)
    return names


def _reached(nodes: Sequence[gs.Node], sources: Mapping[str, str]) -> set[str]:
    """Returns the names of the `sources`, and of tensors that nodes compute from any of these."""
    names = set(sources)
    for node in nodes:
        if any(t.name in names for t in node.inputs):
            names.update(t.name for t in node.outputs)
    return names
