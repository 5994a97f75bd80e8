"""The bytes that a rank has in memory at each step of a run, as functions of the shardings of
tensors.

A rank has weights, states and inputs all the time, the result of a node until the last node that
reads it, and copies for nodes that require another sharding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.subgraphs import subgraphs
from onnxpar.search.reshard_costs import MOST_TOGETHER, ReshardCosts, ShardingDomain, table_of
from onnxpar.search.solver.limits import Demand

Span = tuple[int, int]
"""(first step, last step)."""


@dataclass(frozen=True)
class LiveRange:
    """When a tensor exists.

    span   its first and last step
    reads  (step, domain of the tensor there) for each node that reads it, in order of steps
    """

    span: Span
    reads: Sequence[tuple[int, ShardingDomain]]


class MemoryTimeline:
    """Collects demands on memory, step by step. Each node is a step; the nodes of a body count
    once, not once per iteration.

    demands   the collected demands
    profiles  how many cases are counted: each of the typical sizes, on each rank that may hold
              another amount. The steps of a profile follow the steps of the profile before: a plan
              must fit in memory in each, and no tensor lives from one profile to the next
    """

    def __init__(self, graph: gs.Graph, profiles: int) -> None:
        self.demands: list[Demand] = []
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self._number(graph)
        self.end = max(len(self.first) - 1, 0)
        self.profiles = profiles

    @property
    def steps(self) -> int:
        """The number of steps in all profiles."""
        return self.profiles * (self.end + 1)

    def _number(self, graph: gs.Graph) -> None:
        """Numbers the nodes of a graph as steps; a node comes before the nodes of its bodies."""
        for node in graph.nodes:
            self.first[node.name] = len(self.first)
            for body in subgraphs(node):
                self._number(body)
            self.last[node.name] = len(self.first) - 1

    def add_weight(
        self, reshard_costs: ReshardCosts, required: Sequence[ShardingDomain], count: int
    ) -> None:
        """Adds the demand of `count` equal weights, which are in memory all the time. `required`
        are their domains where nodes read them."""
        for scope in weight_scopes(required):
            self._add(scope, weight_bytes(reshard_costs, scope), [(0, self.end)] * count)

    def add_produced(
        self,
        reshard_costs: ReshardCosts,
        produced: ShardingDomain,
        requested: ShardingDomain,
        live_ranges: Iterable[LiveRange],
    ) -> None:
        """Adds the demand of equal tensors: in the sharding `requested` for as long as they exist
        and, where `produced` differs from it, also in the sharding `produced` during the step that
        produces them."""
        ranges = list(live_ranges)
        self._add([requested], reshard_costs.sizes(requested), [one.span for one in ranges])
        if requested is not produced:
            size = reshard_costs.sizes(produced)[:, :, None] * reshard_costs.differ(
                produced, requested
            )
            starts = [(one.span[0], one.span[0]) for one in ranges]
            self._add([produced, requested], size, starts)

    def add_copies(
        self,
        reshard_costs: ReshardCosts,
        requested: ShardingDomain,
        common: ShardingDomain | None,
        live_ranges: Iterable[LiveRange],
    ) -> None:
        """Adds the demand of copies of equal tensors, for nodes (readers) that require another
        sharding than `requested`. A copy exists while its reader runs, and until the next reader if
        that requires the same sharding; two readers at one step share a copy. A copy `common` to
        all readers exists from the first to the last reader."""
        at: dict[ShardingDomain, list[Span]] = defaultdict(list)
        between: dict[tuple[ShardingDomain, ShardingDomain, int], list[Span]] = defaultdict(list)
        through: list[Span] = []
        for live_range in live_ranges:
            reads = live_range.reads
            for step, reader in reads:
                at[reader].append((step, step))
            for (step, reader), (then, other) in pairwise(reads):
                if then > step + 1:
                    between[reader, other, 1].append((step + 1, then - 1))
                elif then == step:
                    between[reader, other, -1].append((step, step))
            if reads:
                through.append((reads[0][0], reads[-1][0]))
        if common is not None:
            size = _where(reshard_costs.sizes(common), reshard_costs.differ(requested, common))
            self._add([requested, common], size, through)
        for reader, spans in at.items():
            size = reshard_costs.sizes(reader)
            if reader.copied is not None:
                self._add([reader], size * np.array(reader.copied), spans)
                continue
            scope = [requested, reader] if common is None else [requested, common, reader]
            self._add(scope, _where(size, reshard_costs.differ(*scope)), spans)
        for (reader, other, sign), spans in between.items() if common is None else ():
            is_copy = reshard_costs.differ(requested, reader)
            copies = sign * _where(reshard_costs.sizes(reader), is_copy)
            if reader == other:
                self._add([requested, reader], copies, spans)
                continue
            same = ~reshard_costs.differ(reader, other)
            self._add([requested, reader, other], copies[..., None] * same, spans)

    def _add(self, scope: Sequence[ShardingDomain], values: Array, spans: Sequence[Span]) -> None:
        """Adds a demand of `values` bytes during the spans, in every profile. Axis 0 of `values` is
        the profile (or has length 1, for all), the other axes are the shardings of the domains in
        `scope`."""
        if not spans:
            return
        kinds, of = values, np.zeros(self.profiles, int)
        if len(values) > 1:
            kinds, of = np.unique(values, axis=0, return_inverse=True)
        for i, kind in enumerate(kinds):
            if kind.any():
                starts = np.flatnonzero(of.reshape(-1) == i) * (self.end + 1)
                own = np.array(spans) + starts[:, None, None]
                self.demands.append(Demand(table_of(scope, kind), own.reshape(-1, 2)))


def weight_scopes(required: Sequence[ShardingDomain]) -> Iterator[Sequence[ShardingDomain]]:
    """Yields, for each node that reads a weight, the domains over which `weight_bytes` is a table.
    A weight is stored once for each different sharding that nodes require. If a table over all
    these nodes would have more than MOST_TOGETHER entries, each is only compared with the one
    before, so that a sharding may count twice."""
    for i, reader in enumerate(required):
        together = math.prod(len(d.factor_shardings) for d in required[: i + 1])
        yield required[: i + 1] if together <= MOST_TOGETHER else [required[i - 1], reader]


def weight_bytes(reshard_costs: ReshardCosts, scope: Sequence[ShardingDomain]) -> Array:
    """Returns the bytes of a weight in the sharding of the last domain of a scope; 0 where another
    domain of the scope has that sharding, too. Axes: profile, then the shardings of each domain."""
    sizes = reshard_costs.sizes(scope[-1])
    return sizes if len(scope) == 1 else _where(sizes, reshard_costs.differ(*scope))


def _where(sizes: Array, differ: Array) -> Array:
    """Returns the bytes in the sharding of the last of several domains where `differ` is True, else
    0. Axes: profile, then the shardings of each domain."""
    bytes_: Array = sizes.reshape(len(sizes), *[1] * (differ.ndim - 1), -1) * differ
    return bytes_
