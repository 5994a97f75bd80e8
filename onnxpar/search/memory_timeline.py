"""What a rank holds at each step of a run, by how tensors are placed: weights, states and what is
fed all the time, what nodes make until it was last read, and copies for readers that need others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.ir.subgraphs import subgraphs
from onnxpar.search.reshard_costs import MOST_TOGETHER, ReshardCosts, ShardingDomain, table_of
from onnxpar.search.solver.limits import Demand

Span = tuple[int, int]
"""A first and a last step."""


@dataclass(frozen=True)
class LiveRange:
    """When a tensor is there, and at which steps it is read, and how, in order."""

    span: Span
    reads: Sequence[tuple[int, ShardingDomain]]


class MemoryTimeline:
    """Collects demands on memory. A step is a node that runs, those of bodies once. Of several
    `profiles` of open sizes, the steps of each follow those of the one before: a plan must fit in
    each, and what is held in one is not held in another."""

    def __init__(self, graph: gs.Graph, profiles: int) -> None:
        self.demands: list[Demand] = []
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self._number(graph)
        self.end = max(len(self.first) - 1, 0)
        self.profiles = profiles

    @property
    def steps(self) -> int:
        """The steps of all profiles."""
        return self.profiles * (self.end + 1)

    def _number(self, graph: gs.Graph) -> None:
        """The steps of the nodes of a graph, each before those of its bodies."""
        for node in graph.nodes:
            self.first[node.name] = len(self.first)
            for body in subgraphs(node):
                self._number(body)
            self.last[node.name] = len(self.first) - 1

    def add_weight(
        self, reshard_costs: ReshardCosts, required: Sequence[ShardingDomain], count: int
    ) -> None:
        """A weight, or as many that are alike: it is stored once for each placement that it is
        read in, as far as MOST_TOGETHER of these are compared, else only neighbours."""
        span = [(0, self.end)] * count
        if required:
            self._add(required[:1], reshard_costs.sizes(required[0]), span)
        for i, need in enumerate(required[1:], 1):
            together = math.prod(len(end.factor_shardings) for end in required[: i + 1])
            ends = required[: i + 1] if together <= MOST_TOGETHER else [required[i - 1], need]
            self._add(ends, _where(reshard_costs.sizes(need), reshard_costs.differ(*ends)), span)

    def add_produced(
        self,
        reshard_costs: ReshardCosts,
        produced: ShardingDomain,
        requested: ShardingDomain,
        lives: Iterable[LiveRange],
    ) -> None:
        """A tensor as it is asked for, and while it is made, as that is."""
        lives = list(lives)
        self._add([requested], reshard_costs.sizes(requested), [life.span for life in lives])
        if requested is not produced:
            size = reshard_costs.sizes(produced)[:, :, None] * reshard_costs.differ(
                produced, requested
            )
            self._add([produced, requested], size, [(life.span[0], life.span[0]) for life in lives])

    def add_copies(
        self,
        reshard_costs: ReshardCosts,
        requested: ShardingDomain,
        common: ShardingDomain | None,
        lives: Iterable[LiveRange],
    ) -> None:
        """What a tensor becomes for its readers, while these run, and from one to the next that
        reads the same, but once where both are one node; `common` is there from the first reader to
        the last."""
        at: dict[ShardingDomain, list[Span]] = defaultdict(list)
        between: dict[tuple[ShardingDomain, ShardingDomain, int], list[Span]] = defaultdict(list)
        through: list[Span] = []
        for life in lives:
            for step, need in life.reads:
                at[need].append((step, step))
            for (step, need), (then, other) in pairwise(life.reads):
                if then > step + 1:
                    between[need, other, 1].append((step + 1, then - 1))
                elif then == step:
                    between[need, other, -1].append((step, step))
            if life.reads:
                through.append((life.reads[0][0], life.reads[-1][0]))
        if common is not None:
            size = _where(reshard_costs.sizes(common), reshard_costs.differ(requested, common))
            self._add([requested, common], size, through)
        for need, spans in at.items():
            if need.copied is not None:
                self._add([need], reshard_costs.sizes(need) * np.array(need.copied), spans)
                continue
            ends = [requested, need] if common is None else [requested, common, need]
            self._add(ends, _where(reshard_costs.sizes(need), reshard_costs.differ(*ends)), spans)
        for (need, other, sign), spans in between.items() if common is None else ():
            copies = sign * _where(reshard_costs.sizes(need), reshard_costs.differ(requested, need))
            if need == other:
                self._add([requested, need], copies, spans)
                continue
            same = ~reshard_costs.differ(need, other)
            self._add([requested, need, other], copies[..., None] * same, spans)

    def _add(self, ends: Sequence[ShardingDomain], values: Array, spans: Sequence[Span]) -> None:
        """`values` are bytes by profile, or the same in all, and by the placements of the ends."""
        if not spans:
            return
        each = np.broadcast_to(values, (self.profiles, *values.shape[1:]))
        kinds, of = np.unique(each, axis=0, return_inverse=True)
        for i, kind in enumerate(kinds):
            if kind.any():
                starts = np.flatnonzero(of.reshape(-1) == i) * (self.end + 1)
                own = np.array(spans) + starts[:, None, None]
                self.demands.append(Demand(table_of(ends, kind), own.reshape(-1, 2)))


def _where(sizes: Array, differ: Array) -> Array:
    """Sizes by profile and by the last of several ends, where that differs from the others."""
    found: Array = sizes.reshape(len(sizes), *[1] * (differ.ndim - 1), -1) * differ
    return found
