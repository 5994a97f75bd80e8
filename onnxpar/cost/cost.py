"""The cost model of communication, memory traffic and compute: latency, bytes and operations.

A collective is modelled by the messages that the plugin sends (`native/message_transport.cc`):
rounds in which every member sends to every other at once. Where a group crosses hosts, the members
of a host combine what they have before it crosses; this overlaps with what is under way, so the
slower of the two counts. The speed between hosts is that of the slowest link that the group
crosses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from onnxpar.cost.device import NO_RATE, ROW_BYTES, Device
from onnxpar.cost.topology import HOST, Level, Link, Topology
from onnxpar.graph.collectives import KINDS
from onnxpar.layout.mesh import Axes, Mesh, parts_over
from onnxpar.layout.shares import Proportion, Shares, integer_weights

_EVEN = 1e-9
"""Ranks whose shares differ by a smaller fraction take the same."""
DIRECT_BYTES = 384 * 1024
"""Most bytes that a rank may send for an all-reduce in one round, in which each rank sends its
whole tensor to every other. With more, there are two rounds, with chunks of the tensor."""
SPARE_BYTES = 64 * 1024
"""Most bytes that a host may receive in such a round beyond what it needs."""
SCATTERED_BYTES = 64 * 1024
"""Size in bytes above which a broadcast to several ranks sends each a chunk, which that rank passes
on to the others."""


@dataclass(frozen=True)
class Spread:
    """How the ranks of a group are spread over hosts: `locals` on each of `hosts`."""

    locals: int
    hosts: int

    @property
    def ranks(self) -> int:
        return self.locals * self.hosts


def bytes_sent(kind: str, ranks: int, size: float) -> float:
    """Bytes that each rank sends in a collective, for a tensor of `size` bytes on the rank where it
    is largest.

    Assumes ring algorithms: an all-reduce sends everything but the rank's own chunk, twice. A
    collective permute sends a rank's whole shard.
    """
    if KINDS[kind].by_message:
        return size
    return KINDS[kind].traffic * size * (ranks - 1) / ranks


def messages(kind: str, ranks: int, size: float) -> tuple[int, float]:
    """Number of rounds of messages, and total bytes that the busiest rank sends, for a tensor of
    `size` bytes on the rank where it is largest."""
    return _MESSAGES.get(kind, _of_shards)(ranks, size)


def _of_shards(ranks: int, size: float) -> tuple[int, float]:
    """Rounds and bytes if every rank sends a shard to each other rank."""
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
    "CollectivePermute": lambda ranks, size: (1, size),
    "NeighborExchange": lambda ranks, size: (1, size),
    "HaloExchange": lambda ranks, size: (2, size),  # in round 1, ranks ask for elements
}
"""Formulas of rounds and bytes, by kind of collective; for other kinds, `_of_shards` holds."""


_Stage = tuple[int, float]
"""Rounds of messages, and bytes that the busiest rank sends."""


def stages(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """Rounds and bytes inside hosts, and between them, of a collective on several hosts, for a
    tensor of `size` bytes on the rank where it is largest."""
    return _STAGES.get(kind, _between)(kind, spread, size)


def _between(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """All messages count as if they went between hosts."""
    return (0, 0.0), messages(kind, spread.ranks, size)


def _exchanged(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """Each rank sends each other one a shard of its own: those for other hosts cross."""
    shard = size / spread.ranks
    away = spread.ranks - spread.locals
    return (0, shard * (spread.locals - 1)), (1, shard * away)


def _by_host(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """Each rank handles a part of the tensor on its host, and exchanges it with other hosts."""
    part = size / spread.locals
    inside = (int(spread.locals > 1), part * (spread.locals - 1))
    return inside, (1, part * (spread.hosts - 1) / spread.hosts)


def _sums_by_host(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    locals, others = spread.locals - 1, spread.hosts - 1
    if size * (locals + others) <= DIRECT_BYTES and size * locals * others <= SPARE_BYTES:
        return (int(locals > 0), size * locals), (1, size * others)
    return _scattered_sums(spread, size)


def _scattered_sums(spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """A reduce-scatter and an all-gather."""
    (rounds, inside), (between_rounds, between) = _by_host("ReduceScatter", spread, size)
    return (2 * rounds, 2 * inside), (2 * between_rounds, 2 * between)


def _broadcast_by_host(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    others = spread.hosts - 1
    part = size / spread.locals
    inside = (int(spread.locals > 1), part * (spread.locals - 1))
    if size <= SCATTERED_BYTES or others == 1:
        return inside, (1, size * others)
    return inside, (2, size + part * (others - 1) / others)


_STAGES: dict[str, Callable[[str, Spread, float], tuple[_Stage, _Stage]]] = {
    "AllReduce": _sums_by_host,
    "ReduceScatter": _by_host,
    "AllGather": _by_host,
    "Broadcast": _broadcast_by_host,
    "AllToAll": _exchanged,
    "AllToAllV": _exchanged,
}
"""Formulas of the stages of a collective on several hosts; for other kinds, `_between` holds."""


@dataclass(frozen=True)
class Costs:
    """Computes seconds of communication, memory traffic and compute for the ranks of a mesh on a
    topology. Errors: StrategyError if the topology has fewer ranks than the mesh."""

    topology: Topology
    mesh: Mesh
    _crossed: dict[Axes, Level] = field(default_factory=dict, init=False, repr=False, compare=False)
    _spreads: dict[Axes, Spread] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _places: dict[Axes, Sequence[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _shares: dict[Axes, Shares | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _proportions: dict[Axes, Proportion] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _steps: dict[tuple[str, Axes], dict[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.topology.check(self.mesh.size)

    def step(self, kind: str, axes: Axes, size: float) -> float:
        """Seconds of one step of a reshard: a collective over axes, or a local slice or select."""
        return self.local(kind, size) if KINDS[kind].is_local else self.collective(kind, axes, size)

    def steps(self, kind: str, axes: Axes, sizes: Sequence[float]) -> list[float]:
        """Seconds of steps of a reshard as `step` has them, for each of these sizes."""
        known = self._steps.setdefault((kind, axes), {})
        for size in sizes:
            if size not in known:
                known[size] = self.step(kind, axes, size)
        return [known[size] for size in sizes]

    def collective(self, kind: str, axes: Axes, size: float) -> float:
        """Seconds of a collective among the ranks that differ along axes. `size` is the bytes of
        the tensor on a rank where it is largest (before an all-reduce, after an all-gather); for a
        NeighborExchange or HaloExchange, it is the bytes sent."""
        if parts_over(axes) == 1:
            return 0.0
        spread, link = self.spread(axes), self.level(axes).link(kind)
        return self._seconds(kind, spread, link, size)

    def _seconds(self, kind: str, spread: Spread, link: Link, size: float) -> float:
        """Seconds of a collective whose ranks communicate over `link` between hosts, or within the
        only host."""
        if spread.hosts == 1:
            return _transfer(kind, spread.ranks, link, size)
        return _over_hosts(kind, spread, self.topology.levels[0].link(kind), link, size)

    def idle(self, kind: str, groups: Iterable[Sequence[int]], size: float) -> float:
        """Of the seconds of a collective in these groups of ranks, those in which the cores have
        nothing to do: they only wait for a link that is slower than those within a host, where
        cores move the bytes."""
        levels = {self._level_of(group): group for group in groups}
        outermost = max(levels)
        if outermost == 0:
            return 0.0
        link = self.topology.levels[outermost].link(kind)
        unit = self.topology.units()[0]
        group = levels[outermost]
        spread = _spread(len(group), len({rank // unit for rank in group}))
        own = by_cores(link)
        return self._seconds(kind, spread, link, size) - self._seconds(kind, spread, own, size)

    def _level_of(self, group: Sequence[int]) -> int:
        """The number of the innermost level that has all ranks of a group in one unit."""
        units = self.topology.units()
        inside = (i for i, unit in enumerate(units) if len({r // unit for r in group}) == 1)
        return next(inside, len(units))

    def level(self, axes: Axes) -> Level:
        """The outermost level whose links any group of ranks along these axes uses."""
        found = self._crossed.get(axes)
        if found is None:
            found = self._crossed[axes] = self._find_level(axes)
        return found

    def _find_level(self, axes: Axes) -> Level:
        """The innermost level at which every group of ranks along these axes lies in one unit."""
        ranks: Any = np.arange(self.mesh.size)
        firsts = ranks[self.mesh.coordinate(axes, ranks) == 0]
        reach = max(self.mesh.group(axes, 0))
        *inner, outermost = self.topology.levels
        for level, unit in zip(inner, self.topology.units(), strict=True):
            unit = min(unit, self.mesh.size)  # sizes in a file may exceed NumPy's integers
            if (firsts // unit == (firsts + reach) // unit).all():
                return level
        return outermost

    def spread(self, axes: Axes) -> Spread:
        """How a group of ranks along these axes is spread over hosts, the units of the innermost
        level: that on most hosts."""
        if axes not in self._spreads:
            self._spreads[axes] = self._find_spread(axes)
        return self._spreads[axes]

    def _find_spread(self, axes: Axes) -> Spread:
        ranks: Any = np.arange(self.mesh.size)
        if len(self.topology.levels) == 1:
            return Spread(parts_over(axes), 1)
        unit = min(self.topology.units()[0], self.mesh.size)
        firsts = ranks[self.mesh.coordinate(axes, ranks) == 0]
        hosts: Any = np.sort((firsts[:, None] + np.array(self.mesh.group(axes, 0))) // unit, axis=1)
        return _spread(parts_over(axes), 1 + int((np.diff(hosts, axis=1) > 0).sum(axis=1).max()))

    def places(self, axes: Axes) -> Sequence[int]:
        """The place of each rank of the mesh along axes."""
        if axes not in self._places:
            ranks: Any = np.arange(self.mesh.size)
            at: Any = self.mesh.coordinate(axes, ranks)
            self._places[axes] = tuple(np.broadcast_to(at, len(ranks)).tolist())
        return self._places[axes]

    def shares(self, axes: Axes) -> Shares | None:
        """The shares of the work that ranks along axes take; None if all take the same. Of ranks at
        one place along the axes, the shares are added up."""
        if not self.topology.shares:
            return None
        if axes not in self._shares:
            own = np.array(self.topology.shares[: self.mesh.size])
            weights = np.bincount(self.places(axes), own, parts_over(axes))
            is_even = np.ptp(weights) < _EVEN * weights.max()
            counts = tuple(axis.size for axis in axes)
            self._shares[axes] = None if is_even else Shares(counts, tuple(map(float, weights)))
        return self._shares[axes]

    def proportion(self, axes: Axes) -> Proportion | None:
        """The proportion in which ranks along axes share an open size; None if all ranks of the
        mesh take the same. Also for axes along which the shares are equal: shards over them are
        unions of those over further axes."""
        if axes not in self._proportions and self.weights:
            found = np.bincount(self.places(axes), self.weights, parts_over(axes))
            weights = list(map(int, found))
            common = math.gcd(*weights)
            self._proportions[axes] = Proportion(tuple(weight // common for weight in weights))
        return self._proportions.get(axes)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Integers in proportion to the shares of the ranks; empty if all take the same."""
        own = self.topology.shares[: self.mesh.size]
        is_even = not own or max(own) - min(own) < _EVEN * max(own)
        return () if is_even else integer_weights(own)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The devices that ranks of the mesh have, each once."""
        return self.topology.of_ranks(self.mesh.size)

    def local(self, kind: str, size: float) -> float:
        """Seconds of a step of a reshard that copies `size` bytes without communication, such as a
        slice, on the slowest device; the same for every `kind`."""
        return max(device.launch + device.move(size) for device in self.devices)

    def beyond(
        self, kind: str, rows: float, elements: float, device: Device | None = None
    ) -> float:
        """Additional seconds of an op of a kind of RATED with so many rows and elements, on a
        device or, without one, on the slowest; 0 where the kind was not measured."""
        each = self.devices if device is None else (device,)
        rates = [d.ops.get(kind, NO_RATE) for d in each]
        return max(rows * rate.row + elements * rate.element for rate in rates)

    def rows(self, count: float, device: Device | None = None) -> float:
        """Additional seconds for `count` rows that are copied or processed one by one, on a device
        or, without one, on the slowest."""
        each = self.devices if device is None else (device,)
        return count * max(
            d.row if d.row is not None else ROW_BYTES / d.memory_bandwidth for d in each
        )

    def memory(self, size: float, device: Device | None = None, far: float = 0.0) -> float:
        """Seconds to read or write `size` bytes, `far` of which no cache holds, on a device or,
        without one, on the slowest."""
        each = self.devices if device is None else (device,)
        return max(d.move(size - far) + far / d.memory_bandwidth for d in each)

    @cached_property
    def cache(self) -> float:
        """The bytes that the smallest cache of a rank holds; 0 if a device has none."""
        return min(device.cache or 0.0 for device in self.devices)

    def compute(
        self,
        flops: float,
        size: float,
        convolves: bool = False,
        device: Device | None = None,
        far: float = 0.0,
    ) -> float:
        """Seconds of an op with `flops` multiplications and additions that reads and writes `size`
        bytes, `far` of which no cache holds: the launch, plus the slower of the two (the roofline
        model), plus what `Device.exposed` adds. On a device or, without one, on the slowest."""
        each = self.devices if device is None else (device,)
        return max(_roofline(d, flops, size, far, convolves) for d in each)


def by_cores(link: Link) -> Link:
    """A link on which a collective takes no longer than the cores of a host would move its
    bytes."""
    return Link(min(HOST.latency, link.latency), max(HOST.bandwidth, link.bandwidth))


def hidden_hosts(topology: Topology) -> Topology:
    """The topology in which collectives between hosts take only the seconds in which cores work for
    them, as if compute hid the others."""
    inner, *outer = topology.levels
    return replace(topology, levels=(inner, *map(_by_cores, outer)))


def _by_cores(level: Level) -> Level:
    own = by_cores(Link(level.latency, level.bandwidth))
    measured = {kind: by_cores(link) for kind, link in level.collectives.items()}
    return replace(level, latency=own.latency, bandwidth=own.bandwidth, collectives=measured)


def _spread(ranks: int, hosts: int) -> Spread:
    """Ranks on so many hosts, as if these had equally many."""
    return Spread(-(-ranks // hosts), hosts)


def _over_hosts(kind: str, spread: Spread, inside: Link, between: Link, size: float) -> float:
    """Seconds of a collective of several hosts."""
    seconds = _overlapped(stages(kind, spread, size), inside, between)
    if kind == "AllReduce":  # no jump of costs where the plugin changes its algorithm
        return min(seconds, _overlapped(_scattered_sums(spread, size), inside, between))
    return seconds


def _overlapped(each: tuple[_Stage, _Stage], inside: Link, between: Link) -> float:
    """Seconds of two stages: their bytes move at once, and their rounds one after the other."""
    (rounds, own), (between_rounds, away) = each
    latency = rounds * inside.latency + between_rounds * between.latency
    return latency + max(own / inside.bandwidth, away / between.bandwidth)


def _transfer(kind: str, ranks: int, link: Link, size: float) -> float:
    """Seconds of a collective of several ranks of a host over a link."""
    rounds, sent = messages(kind, ranks, size)
    seconds = rounds * link.latency + sent / link.bandwidth
    if kind == "AllReduce":  # no jump of costs where the plugin changes its algorithm
        return min(seconds, 2 * link.latency + bytes_sent(kind, ranks, size) / link.bandwidth)
    return seconds


def _roofline(device: Device, flops: float, size: float, far: float, convolves: bool) -> float:
    rate = device.convolution if convolves and device.convolution else device.flops
    return device.launch + device.roofline(flops / rate, size, far)
