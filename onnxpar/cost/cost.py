"""The cost model of communication, memory traffic and compute, from latencies, bytes and
operations.

The model of a collective counts the messages that the plugin sends (`native/message_transport.cc`).
They go in rounds: in each, every member sends to every other at once. Where a group crosses hosts,
the members on a host combine their tensors before the result crosses. Both overlap, so the slower
of the two counts. The speed between hosts is that of the slowest link that the group crosses.
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
"""Shares of ranks that differ by a smaller fraction count as equal."""
DIRECT_BYTES = 384 * 1024
"""Most bytes that a rank may send for an all-reduce in one round; in it, each rank sends its whole
tensor to every other. With more bytes, there are two rounds, with chunks of the tensor."""
SPARE_BYTES = 64 * 1024
"""Most bytes beyond its need that a host may receive in the one round of an all-reduce."""
SCATTERED_BYTES = 64 * 1024
"""Size in bytes above which a broadcast to several ranks sends a chunk to each, which this rank
passes on to the others."""


@dataclass(frozen=True)
class Spread:
    """The spread of a group's ranks over hosts: `locals` ranks on each of `hosts` hosts."""

    locals: int
    hosts: int

    @property
    def ranks(self) -> int:
        return self.locals * self.hosts


def bytes_sent(kind: str, ranks: int, size: float) -> float:
    """Bytes that each rank sends in a collective, for a tensor of `size` bytes on the rank where it
    is largest.

    Assumes ring algorithms: an all-reduce sends all chunks but the rank's own, twice. A collective
    permute sends a rank's whole shard.
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
    """Rounds and bytes of an all-reduce within a host."""
    if size * (ranks - 1) <= DIRECT_BYTES:
        return 1, size * (ranks - 1)
    return 2, 2 * size * (ranks - 1) / ranks


def _of_broadcast(ranks: int, size: float) -> tuple[int, float]:
    """Rounds and bytes of a broadcast within a host."""
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
"""Formulas of rounds and bytes, by kind of collective; other kinds use `_of_shards`."""


_Stage = tuple[int, float]
"""Rounds of messages, and bytes that the busiest rank sends."""


def stages(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """Returns the stage inside hosts and the stage between them, of a collective over several
    hosts, for a tensor of `size` bytes on the rank where it is largest."""
    return _STAGES.get(kind, _between)(kind, spread, size)


def _between(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """Stages that count all messages as if they went between hosts."""
    return (0, 0.0), messages(kind, spread.ranks, size)


def _exchanged(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """Stages of an all-to-all: each rank sends a shard to each other rank; shards for other hosts
    cross."""
    shard = size / spread.ranks
    away = spread.ranks - spread.locals
    return (0, shard * (spread.locals - 1)), (1, shard * away)


def _by_host(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """Stages of a collective in which each rank handles a part of the tensor on its host, and
    exchanges this part with other hosts."""
    part = size / spread.locals
    inside = (int(spread.locals > 1), part * (spread.locals - 1))
    return inside, (1, part * (spread.hosts - 1) / spread.hosts)


def _sums_by_host(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """Stages of an all-reduce."""
    locals, peers = spread.locals - 1, spread.hosts - 1
    if size * (locals + peers) <= DIRECT_BYTES and size * locals * peers <= SPARE_BYTES:
        return (int(locals > 0), size * locals), (1, size * peers)
    return _scattered_sums(spread, size)


def _scattered_sums(spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """Stages of a reduce-scatter and an all-gather."""
    (rounds, inside), (between_rounds, between) = _by_host("ReduceScatter", spread, size)
    return (2 * rounds, 2 * inside), (2 * between_rounds, 2 * between)


def _broadcast_by_host(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """Stages of a broadcast."""
    peers = spread.hosts - 1
    part = size / spread.locals
    inside = (int(spread.locals > 1), part * (spread.locals - 1))
    if size <= SCATTERED_BYTES or peers == 1:
        return inside, (1, size * peers)
    return inside, (2, size + part * (peers - 1) / peers)


_STAGES: dict[str, Callable[[str, Spread, float], tuple[_Stage, _Stage]]] = {
    "AllReduce": _sums_by_host,
    "ReduceScatter": _by_host,
    "AllGather": _by_host,
    "Broadcast": _broadcast_by_host,
    "AllToAll": _exchanged,
    "AllToAllV": _exchanged,
}
"""Formulas of the stages of a collective over several hosts; other kinds use `_between`."""


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
        """Seconds of steps of a reshard, one for each of these sizes; remembers them."""
        known = self._steps.setdefault((kind, axes), {})
        for size in sizes:
            if size not in known:
                known[size] = self.step(kind, axes, size)
        return [known[size] for size in sizes]

    def collective(self, kind: str, axes: Axes, size: float) -> float:
        """Seconds of a collective among the ranks that differ along axes. `size` is the bytes of
        the tensor on the rank where it is largest (before an all-reduce, after an all-gather); for
        a NeighborExchange or HaloExchange, it is the bytes that a rank sends."""
        if parts_over(axes) == 1:
            return 0.0
        spread, link = self.spread(axes), self.level(axes).link(kind)
        return self._seconds(kind, spread, link, size)

    def _seconds(self, kind: str, spread: Spread, link: Link, size: float) -> float:
        """Seconds of a collective. Its ranks communicate over `link` between hosts, or within the
        only host."""
        if spread.hosts == 1:
            return _transfer(kind, spread.ranks, link, size)
        return _over_hosts(kind, spread, self.topology.levels[0].link(kind), link, size)

    def idle(self, kind: str, groups: Iterable[Sequence[int]], size: float) -> float:
        """Seconds of a collective in these groups of ranks in which the cores are idle: they wait
        for a link between hosts, which is slower than the links within a host, where cores move the
        bytes."""
        levels = {self._level_of(group): group for group in groups}
        outermost = max(levels)
        if outermost == 0:
            return 0.0
        link = self.topology.levels[outermost].link(kind)
        unit = self.topology.units()[0]
        group = levels[outermost]
        spread = _spread(len(group), len({rank // unit for rank in group}))
        moved_by_cores = by_cores(link)
        return self._seconds(kind, spread, link, size) - self._seconds(
            kind, spread, moved_by_cores, size
        )

    def _level_of(self, group: Sequence[int]) -> int:
        """The index of the innermost level that has all ranks of a group in one unit."""
        units = self.topology.units()
        inside = (i for i, unit in enumerate(units) if len({r // unit for r in group}) == 1)
        return next(inside, len(units))

    def level(self, axes: Axes) -> Level:
        """The outermost level whose links some group of ranks along these axes uses."""
        level = self._crossed.get(axes)
        if level is None:
            level = self._crossed[axes] = self._find_level(axes)
        return level

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
        """The spread of a group of ranks along these axes over hosts, which are the units of the
        innermost level. Of several groups, this is the group on most hosts."""
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
        """The index of each rank of the mesh along axes."""
        if axes not in self._places:
            ranks: Any = np.arange(self.mesh.size)
            at: Any = self.mesh.coordinate(axes, ranks)
            self._places[axes] = tuple(np.broadcast_to(at, len(ranks)).tolist())
        return self._places[axes]

    def shares(self, axes: Axes) -> Shares | None:
        """The shares of the work that ranks along axes take; None if the shares are equal. The
        shares of ranks with the same index along the axes are added up."""
        if not self.topology.shares:
            return None
        if axes not in self._shares:
            by_rank = np.array(self.topology.shares[: self.mesh.size])
            weights = np.bincount(self.places(axes), by_rank, parts_over(axes))
            is_even = np.ptp(weights) < _EVEN * weights.max()
            counts = tuple(axis.size for axis in axes)
            self._shares[axes] = None if is_even else Shares(counts, tuple(map(float, weights)))
        return self._shares[axes]

    def proportion(self, axes: Axes) -> Proportion | None:
        """The proportion in which ranks along axes share an open size; None if all ranks of the
        mesh take the same. Axes along which the shares are equal have a proportion, too: shards
        over them are unions of shards over further axes."""
        if axes not in self._proportions and self.weights:
            sums = np.bincount(self.places(axes), self.weights, parts_over(axes))
            weights = list(map(int, sums))
            common = math.gcd(*weights)
            self._proportions[axes] = Proportion(tuple(weight // common for weight in weights))
        return self._proportions.get(axes)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Integers in proportion to the shares of the ranks; empty if all ranks take the same."""
        shares = self.topology.shares[: self.mesh.size]
        is_even = not shares or max(shares) - min(shares) < _EVEN * max(shares)
        return () if is_even else integer_weights(shares)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The distinct devices of the mesh's ranks."""
        return self.topology.of_ranks(self.mesh.size)

    def local(self, kind: str, size: float) -> float:
        """Seconds of a step of a reshard that copies `size` bytes without communication, such as a
        slice, on the slowest device; they do not depend on `kind`."""
        return max(device.launch + device.move(size) for device in self.devices)

    def beyond(
        self, kind: str, rows: float, elements: float, device: Device | None = None
    ) -> float:
        """Additional seconds of an op of a kind in RATED with this number of rows and elements, on
        a device or, without one, on the slowest device. 0 if the kind was not measured."""
        devices = self.devices if device is None else (device,)
        rates = [d.ops.get(kind, NO_RATE) for d in devices]
        return max(rows * rate.row + elements * rate.element for rate in rates)

    def rows(self, count: float, device: Device | None = None) -> float:
        """Additional seconds for `count` rows that an op copies or processes one by one, on a
        device or, without one, on the slowest device."""
        devices = self.devices if device is None else (device,)
        return count * max(
            d.row if d.row is not None else ROW_BYTES / d.memory_bandwidth for d in devices
        )

    def memory(self, size: float, device: Device | None = None, far: float = 0.0) -> float:
        """Seconds to read or write `size` bytes, with `far` of these bytes in no cache, on a device
        or, without one, on the slowest device."""
        devices = self.devices if device is None else (device,)
        return max(d.move(size - far) + far / d.memory_bandwidth for d in devices)

    @cached_property
    def cache(self) -> float:
        """The bytes of the smallest cache of a rank; 0 if a device has none."""
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
        bytes, of which `far` bytes are in no cache. They are the launch, plus the slower of
        computing and moving bytes (the roofline model), plus the time that `Device.exposed` adds.
        On a device or, without one, on the slowest device."""
        devices = self.devices if device is None else (device,)
        return max(_roofline(d, flops, size, far, convolves) for d in devices)


def by_cores(link: Link) -> Link:
    """A link on which a collective takes no longer than the cores of a host take to move its
    bytes."""
    return Link(min(HOST.latency, link.latency), max(HOST.bandwidth, link.bandwidth))


def hidden_hosts(topology: Topology) -> Topology:
    """The topology in which a collective between hosts takes only the seconds in which cores work
    for it, as if compute hid its other seconds."""
    inner, *outer = topology.levels
    return replace(topology, levels=(inner, *map(_by_cores, outer)))


def _by_cores(level: Level) -> Level:
    link = by_cores(Link(level.latency, level.bandwidth))
    measured = {kind: by_cores(link) for kind, link in level.collectives.items()}
    return replace(level, latency=link.latency, bandwidth=link.bandwidth, collectives=measured)


def _spread(ranks: int, hosts: int) -> Spread:
    """The spread of ranks over hosts, as if each host had the same number of ranks."""
    return Spread(-(-ranks // hosts), hosts)


def _over_hosts(kind: str, spread: Spread, inside: Link, between: Link, size: float) -> float:
    """Seconds of a collective over several hosts."""
    seconds = _overlapped(stages(kind, spread, size), inside, between)
    if kind == "AllReduce":  # no jump of costs where the plugin changes its algorithm
        return min(seconds, _overlapped(_scattered_sums(spread, size), inside, between))
    return seconds


def _overlapped(pair: tuple[_Stage, _Stage], inside: Link, between: Link) -> float:
    """Seconds of two stages that overlap: their bytes move at once, and their rounds come one after
    the other."""
    (rounds, near), (between_rounds, away) = pair
    latency = rounds * inside.latency + between_rounds * between.latency
    return latency + max(near / inside.bandwidth, away / between.bandwidth)


def _transfer(kind: str, ranks: int, link: Link, size: float) -> float:
    """Seconds of a collective of several ranks of one host over a link."""
    rounds, sent = messages(kind, ranks, size)
    seconds = rounds * link.latency + sent / link.bandwidth
    if kind == "AllReduce":  # no jump of costs where the plugin changes its algorithm
        return min(seconds, 2 * link.latency + bytes_sent(kind, ranks, size) / link.bandwidth)
    return seconds


def _roofline(device: Device, flops: float, size: float, far: float, convolves: bool) -> float:
    """Seconds of an op with these operations and bytes on a device."""
    rate = device.convolution if convolves and device.convolution else device.flops
    return device.launch + device.roofline(flops / rate, size, far)
