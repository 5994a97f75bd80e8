"""What talking, moving and computing cost: latency, bytes and operations, by topology.

A collective is the messages that the plugin sends (`native/gloo_transport.cc`): rounds of them, in
each of which every member talks to every other at once. The slowest link that a group crosses
decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxpar.cost.topology import ROW_BYTES, Level, Topology
from onnxpar.ir.collectives import KINDS
from onnxpar.layout.mesh import Axes, Mesh, parts_over

DIRECT_BYTES = 384 * 1024
"""An all-reduce that sends no more is one round, everything to everyone, instead of two."""
SCATTERED_BYTES = 64 * 1024
"""From here on, a broadcast to several ranks has them pass chunks on."""


def bytes_sent(kind: str, ranks: int, size: float) -> float:
    """Bytes that each rank sends, of a tensor that takes `size` bytes where it is largest.

    Ring algorithms: an all-reduce sends everything but its own part, twice.
    """
    return KINDS[kind].traffic * size * (ranks - 1) / ranks


def messages(kind: str, ranks: int, size: float) -> tuple[int, float]:
    """Rounds of messages, one after the other, and the bytes that the busiest rank sends in all, of
    a tensor that takes `size` bytes where it is largest."""
    return _MESSAGES.get(kind, _of_shards)(ranks, size)


def _of_shards(ranks: int, size: float) -> tuple[int, float]:
    """Every member sends each other one a shard."""
    return 1, size * (ranks - 1) / ranks


def _of_all_reduce(ranks: int, size: float) -> tuple[int, float]:
    if size * (ranks - 1) <= DIRECT_BYTES:
        return 1, size * (ranks - 1)
    return 2, 2 * size * (ranks - 1) / ranks


def _of_broadcast(ranks: int, size: float) -> tuple[int, float]:
    if size <= SCATTERED_BYTES or ranks == 2:
        return 1, size * (ranks - 1)
    return 2, size + size * (ranks - 2) / (ranks - 1)


_MESSAGES: dict[str, Callable[[int, float], tuple[int, float]]] = {
    "AllReduce": _of_all_reduce,
    "Broadcast": _of_broadcast,
    "Send": lambda ranks, size: (1, size),
    "NeighborExchange": lambda ranks, size: (1, size),
    "HaloExchange": lambda ranks, size: (2, size),  # first, ranks say which elements they want
}
"""The formulas of kinds whose members do not simply send each other shards."""


@dataclass(frozen=True)
class Costs:
    """Seconds of everything that ranks of a mesh do, on a topology. Errors: StrategyError where it
    has fewer ranks than the mesh."""

    topology: Topology
    mesh: Mesh
    _crossed: dict[Axes, Level] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.topology.check(self.mesh.size)

    def step(self, kind: str, axes: Axes, size: float) -> float:
        """One step of a reshard: a collective over axes, or a local cut or select."""
        return self.local(kind, size) if KINDS[kind].is_local else self.collective(kind, axes, size)

    def collective(self, kind: str, axes: Axes, size: float) -> float:
        """A collective among the ranks that differ along axes, of a tensor that takes `size` bytes
        on a rank where it is largest: before an all-reduce, behind an all-gather. Of a
        NeighborExchange or HaloExchange, the bytes that are sent."""
        ranks = parts_over(axes)
        if ranks == 1:
            return 0.0
        link = self.level(axes).link(kind)
        rounds, sent = messages(kind, ranks, size)
        seconds = rounds * link.latency + sent / link.bandwidth
        if kind == "AllReduce":  # not worth taking apart wherever the plugin changes its way
            return min(seconds, 2 * link.latency + bytes_sent(kind, ranks, size) / link.bandwidth)
        return seconds

    def level(self, axes: Axes) -> Level:
        """The outermost level that a group along axes crosses."""
        found = self._crossed.get(axes)
        if found is None:
            found = self._crossed[axes] = self._find_level(axes)
        return found

    def _find_level(self, axes: Axes) -> Level:
        """The innermost level of which one unit holds each whole group."""
        ranks: Any = np.arange(self.mesh.size)
        firsts = ranks[self.mesh.coordinate(axes, ranks) == 0]
        reach = max(self.mesh.group(axes, 0))
        *inner, outermost = self.topology.levels
        for level, unit in zip(inner, self.topology.units(), strict=True):
            unit = min(unit, self.mesh.size)  # numbers in a file may be larger than NumPy's
            if (firsts // unit == (firsts + reach) // unit).all():
                return level
        return outermost

    def local(self, kind: str, size: float) -> float:
        """A copy of `size` bytes: a cut, or a select."""
        return self.topology.device.launch + size / self.topology.device.memory_bandwidth

    def rows(self, count: float) -> float:
        """What so many rows take, each of which is moved or worked on by itself."""
        device = self.topology.device
        return count * (ROW_BYTES / device.memory_bandwidth if device.row is None else device.row)

    def compute(self, flops: float, size: float, convolves: bool = False) -> float:
        """An op of so many multiplications and additions that reads and writes `size` bytes: the
        slower of the two (the roofline), behind the launch."""
        device = self.topology.device
        rate = device.convolution if convolves and device.convolution else device.flops
        return device.launch + max(flops / rate, size / device.memory_bandwidth)
