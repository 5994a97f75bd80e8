"""Which node produces each tensor of a graph, and which nodes read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from onnxpar.graph.subgraphs import captured
from onnxpar.search.op_strategies import OpStrategy
from onnxpar.sharding.factors import Links, OpFactors
from onnxpar.sharding.state import FactorSharding


@dataclass(frozen=True)
class Port:
    """A place where a node produces or reads a tensor.

    op        the node
    index     the number of the result or operand; None for an input or output of one of the node's
              bodies (of an If, Loop or Scan)
    links     in a body: for each leaf of the tensor, the node's leaf with the same axes
    is_whole  True if the tensor is read by a body inside of which nothing is split
    """

    op: OpFactors
    index: int | None
    links: Links = ()
    is_whole: bool = False

    def leaves(self, reads: bool) -> Links:
        """Returns for each leaf (splittable part) of the tensor the index of the node's leaf with
        the same axes, None for one that stays whole: where the node reads the tensor or, if not
        `reads`, where it produces the tensor."""
        if self.index is None:
            return self.links
        return (self.op.inputs if reads else self.op.outputs)[self.index]

    def produced(self, strategy: OpStrategy) -> FactorSharding:
        """Returns the sharding in which the node produces the tensor, under a strategy."""
        if self.index is None:
            return FactorSharding(strategy.leaves(self.links))
        return strategy.result(self.op, self.index)

    def required(self, strategy: OpStrategy) -> FactorSharding:
        """Returns the sharding in which the node reads the tensor, under a strategy."""
        if self.index is None:
            return FactorSharding(strategy.leaves(self.links))
        return strategy.operand(self.op, self.index)


class PortShardings:
    """The sharding (axes for each leaf) of each operand and result of a node, under each of its
    strategies. Strategies that split the leaves of a tensor equally share one sharding object."""

    def __init__(self, strategies: Sequence[OpStrategy], op: OpFactors) -> None:
        numbers: dict[Hashable, int] = {}

        def number(key: Hashable) -> int:
            return numbers.setdefault(key, len(numbers))

        self.strategies = strategies
        self._axes = [[number(axes) for axes in s.axes] for s in strategies]
        self._sums = [number((s.own_partial(op), s.passed, s.reduce, s.group)) for s in strategies]

    def at(self, port: Port, reads: bool) -> tuple[FactorSharding, ...]:
        """Returns the sharding of the tensor at a port, for each strategy."""
        sharding_of = port.required if reads else port.produced
        links = [link for link in port.leaves(reads) if link is not None]
        known: dict[tuple[int, ...], FactorSharding] = {}
        same: dict[FactorSharding, FactorSharding] = {}
        shardings = []
        for strategy, axes, sums in zip(self.strategies, self._axes, self._sums, strict=True):
            key = (sums, *(axes[link] for link in links))
            if key not in known:
                sharding = sharding_of(strategy)
                known[key] = same.setdefault(sharding, sharding)
            shardings.append(known[key])
        return tuple(shardings)


class Ports:
    """For each tensor, by name: the port that produces it (`producers`), and the ports that read it
    (`readers`)."""

    def __init__(self, ops: Iterable[OpFactors]) -> None:
        self.producers: dict[str, Port] = {}
        self.readers: dict[str, list[Port]] = defaultdict(list)
        for op in ops:
            self._add(op)

    def _add(self, op: OpFactors) -> None:
        """Adds the ports of a node."""
        for i, tensor in enumerate(op.node.inputs):
            self.readers[tensor.name].append(Port(op, i))
        for i, tensor in enumerate(op.node.outputs):
            self.producers[tensor.name] = Port(op, i)
        for body in op.bodies:
            for tensor, links in zip(body.graph.inputs, body.inputs, strict=True):
                self.producers[tensor.name] = Port(op, None, links)
            for tensor, links in zip(body.graph.outputs, body.outputs, strict=True):
                self.readers[tensor.name].append(Port(op, None, links))
        for tensor, _, _ in [] if op.bodies else captured(op.node):
            self.readers[tensor.name].append(Port(op, None, is_whole=True))
