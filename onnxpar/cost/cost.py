"""The cost model: seconds of communication, memory traffic and compute, from latencies, bytes and
operations.

The model of a collective counts the messages that the plugin sends (`native/message_transport.cc`),
in rounds: in a round, every member sends to every other at once. Where a group crosses hosts, the
members on a host combine their tensors before the result crosses; both stages overlap, so the
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
"""Shares of work that differ by a smaller relative amount count as equal."""
DIRECT_BYTES = 384 * 1024
"""An all-reduce runs in one round, in which each rank sends its whole tensor to every other, if a
rank sends at most this many bytes so. With more, it takes two rounds with chunks of the tensor."""
SPARE_BYTES = 64 * 1024
"""Across hosts, an all-reduce runs in one round only if a host receives at most this many bytes
more than in two rounds."""
SCATTERED_BYTES = 64 * 1024
"""A broadcast of more bytes takes two rounds: the root sends a different chunk to each rank, and
these send their chunks to each other."""


@dataclass(frozen=True)
class Spread:
    """The places of a group's ranks: `locals` ranks on each of `hosts` hosts."""

    locals: int
    hosts: int

    @property
    def ranks(self) -> int:
        return self.locals * self.hosts


def bytes_sent(kind: str, ranks: int, size: float) -> float:
    """Returns the bytes that each rank sends in a ring algorithm of this kind of collective, for a
    tensor of `size` bytes (on the rank where it is largest). An all-reduce of n bytes over 4 ranks
    sends 2 * n * 3/4."""
    if KINDS[kind].by_message:
        return size
    return KINDS[kind].traffic * size * (ranks - 1) / ranks


def messages(kind: str, ranks: int, size: float) -> tuple[int, float]:
    """Returns (rounds of messages, bytes that the busiest rank sends) of a collective within a
    host, for a tensor of `size` bytes (on the rank where it is largest)."""
    return _MESSAGES.get(kind, _of_shards)(ranks, size)


def _of_shards(ranks: int, size: float) -> tuple[int, float]:
    """`messages` (rounds, bytes) of collectives in which every rank sends a shard to each other
    rank, in one round."""
    return 1, size * (ranks - 1) / ranks


def _of_all_reduce(ranks: int, size: float) -> tuple[int, float]:
    """`messages` (rounds, bytes that a rank sends) of an all-reduce within a host: one round if the
    tensor is small, else two."""
    if size * (ranks - 1) <= DIRECT_BYTES:
        return 1, size * (ranks - 1)
    return 2, 2 * size * (ranks - 1) / ranks


def _of_broadcast(ranks: int, size: float) -> tuple[int, float]:
    """`messages` (rounds, bytes that the busiest rank sends) of a broadcast within a host."""
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
"""Formulas of `messages` by kind of collective; other kinds use `_of_shards`."""


_Stage = tuple[int, float]
"""(rounds of messages, bytes that the busiest rank sends)."""


def stages(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """Returns two stages of a collective over several hosts, the one inside hosts and the one
    between hosts; each is (rounds of messages, bytes that the busiest rank sends). `size` as for
    `messages`."""
    return _STAGES.get(kind, _between)(kind, spread, size)


def _between(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """`stages` (inside hosts, between hosts; each rounds and bytes) that count all messages as
    messages between hosts."""
    return (0, 0.0), messages(kind, spread.ranks, size)


def _exchanged(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """`stages` (inside hosts, between hosts; each rounds and bytes) of an all-to-all: each rank
    sends a shard to each other rank, on its own host or on others."""
    shard = size / spread.ranks
    away = spread.ranks - spread.locals
    return (0, shard * (spread.locals - 1)), (1, shard * away)


def _by_host(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """`stages` (inside hosts, between hosts; each rounds and bytes) of collectives in which the
    ranks of a host share the tensor: each handles one part on its host, and exchanges this part
    with its counterparts on other hosts."""
    part = size / spread.locals
    inside = (int(spread.locals > 1), part * (spread.locals - 1))
    return inside, (1, part * (spread.hosts - 1) / spread.hosts)


def _sums_by_host(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """`stages` (inside hosts, between hosts; each rounds and bytes) of an all-reduce: one round if
    the tensor is small, else as `_scattered_sums`."""
    locals, peers = spread.locals - 1, spread.hosts - 1
    if size * (locals + peers) <= DIRECT_BYTES and size * locals * peers <= SPARE_BYTES:
        return (int(locals > 0), size * locals), (1, size * peers)
    return _scattered_sums(spread, size)


def _scattered_sums(spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """`stages` (inside hosts, between hosts; each rounds and bytes) of an all-reduce as a
    reduce-scatter and an all-gather."""
    (rounds, inside), (between_rounds, between) = _by_host("ReduceScatter", spread, size)
    return (2 * rounds, 2 * inside), (2 * between_rounds, 2 * between)


def _broadcast_by_host(kind: str, spread: Spread, size: float) -> tuple[_Stage, _Stage]:
    """`stages` (inside hosts, between hosts; each rounds and bytes) of a broadcast."""
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
    topology. Methods with a parameter `device` return the seconds on that device; None: on the
    slowest device of the mesh. Errors: StrategyError if the topology has fewer ranks than the mesh.
    """

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
        """Returns the seconds of one step of a reshard: a collective over `axes`, or a local slice.
        `size` is in bytes, as for `collective`."""
        return self.local(kind, size) if KINDS[kind].is_local else self.collective(kind, axes, size)

    def steps(self, kind: str, axes: Axes, sizes: Sequence[float]) -> list[float]:
        """Returns `step` for each of these sizes; caches the results."""
        known = self._steps.setdefault((kind, axes), {})
        for size in sizes:
            if size not in known:
                known[size] = self.step(kind, axes, size)
        return [known[size] for size in sizes]

    def collective(self, kind: str, axes: Axes, size: float) -> float:
        """Returns the seconds of a collective over `axes`, in all its groups at once. `size` is the
        bytes of the tensor on the rank where it is largest (before an all-reduce, after an
        all-gather); for a NeighborExchange or HaloExchange, the bytes that a rank sends."""
        if parts_over(axes) == 1:
            return 0.0
        spread, link = self.spread(axes), self.level(axes).link(kind)
        return self._seconds(kind, spread, link, size)

    def _seconds(self, kind: str, spread: Spread, link: Link, size: float) -> float:
        """Returns the seconds of a collective. `link` is that between hosts; for a group on one
        host, that within it."""
        if spread.hosts == 1:
            return _transfer(kind, spread.ranks, link, size)
        return _over_hosts(kind, spread, self.topology.levels[0].link(kind), link, size)

    def idle(self, kind: str, groups: Iterable[Sequence[int]], size: float) -> float:
        """Returns the seconds of a collective in which cores are idle, so that other ops can run:
        they wait for a link between hosts. Within a host, cores move the bytes themselves. `groups`
        are the groups of ranks that run the collective."""
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
        """Returns the index of the innermost level (host, rack, ...) in which a single unit
        contains all ranks of a group."""
        units = self.topology.units()
        inside = (i for i, unit in enumerate(units) if len({r // unit for r in group}) == 1)
        return next(inside, len(units))

    def level(self, axes: Axes) -> Level:
        """Returns the outermost level over whose links some group of ranks along these axes
        communicates."""
        level = self._crossed.get(axes)
        if level is None:
            level = self._crossed[axes] = self._find_level(axes)
        return level

    def _find_level(self, axes: Axes) -> Level:
        """Returns the innermost level at which each group of ranks along these axes lies inside one
        unit."""
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
        """Returns the places of a group of ranks along these axes on hosts (units of the innermost
        level); of several groups, the group on most hosts."""
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
        """Returns, for each rank of the mesh, its row-major position along these axes."""
        if axes not in self._places:
            ranks: Any = np.arange(self.mesh.size)
            at: Any = self.mesh.coordinate(axes, ranks)
            self._places[axes] = tuple(np.broadcast_to(at, len(ranks)).tolist())
        return self._places[axes]

    def shares(self, axes: Axes) -> Shares | None:
        """Returns the shares of the work that ranks along axes take, where some ranks are slower;
        None if all take the same. The shares of ranks at the same position along the axes are added
        up."""
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
        """Returns the integer proportion in which ranks along axes divide an open size; None if all
        ranks of the mesh take the same. Axes along which shares are equal have one, too, because
        shards over these axes must be unions of shards over further axes."""
        if axes not in self._proportions and self.weights:
            sums = np.bincount(self.places(axes), self.weights, parts_over(axes))
            weights = list(map(int, sums))
            common = math.gcd(*weights)
            self._proportions[axes] = Proportion(tuple(weight // common for weight in weights))
        return self._proportions.get(axes)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Small integers in proportion to the shares of all ranks; empty if all take the same."""
        shares = self.topology.shares[: self.mesh.size]
        is_even = not shares or max(shares) - min(shares) < _EVEN * max(shares)
        return () if is_even else integer_weights(shares)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The different devices of the mesh's ranks, each once."""
        return self.topology.of_ranks(self.mesh.size)

    def local(self, kind: str, size: float) -> float:
        """Returns the seconds of a step of a reshard that only copies `size` bytes on each rank,
        such as a slice. They do not depend on `kind`."""
        return max(device.launch + device.move(size) for device in self.devices)

    def beyond(
        self, kind: str, rows: float, elements: float, device: Device | None = None
    ) -> float:
        """Returns the seconds that an op of a kind in RATED takes beyond the general model, for its
        numbers of rows and elements; 0 if the kind was not measured."""
        devices = self.devices if device is None else (device,)
        rates = [d.ops.get(kind, NO_RATE) for d in devices]
        return max(rows * rate.row + elements * rate.element for rate in rates)

    def rows(self, count: float, device: Device | None = None) -> float:
        """Returns the additional seconds for `count` rows (runs of contiguous elements) that an op
        handles one by one."""
        devices = self.devices if device is None else (device,)
        return count * max(
            d.row if d.row is not None else ROW_BYTES / d.memory_bandwidth for d in devices
        )

    def memory(self, size: float, device: Device | None = None, far: float = 0.0) -> float:
        """Returns the seconds to read or write `size` bytes, of which `far` are certainly in no
        cache."""
        devices = self.devices if device is None else (device,)
        return max(d.move(size - far) + far / d.memory_bandwidth for d in devices)

    @cached_property
    def cache(self) -> float:
        """The bytes of the smallest cache of any rank; 0 if a device has none."""
        return min(device.cache or 0.0 for device in self.devices)

    def compute(
        self,
        flops: float,
        size: float,
        convolves: bool = False,
        device: Device | None = None,
        far: float = 0.0,
    ) -> float:
        """Returns the seconds of an op: its launch, plus the slower of computing and moving bytes
        (the roofline model), plus what `Device.exposed` adds.

        flops      multiplications and additions, each counted as one
        size       bytes that the op reads and writes
        convolves  True: at the rate of convolutions
        far        part of `size`: bytes that are certainly in no cache
        """
        devices = self.devices if device is None else (device,)
        return max(_roofline(d, flops, size, far, convolves) for d in devices)


def by_cores(link: Link) -> Link:
    """Returns a link with at least the speed at which the cores of a host move bytes: the part of a
    collective during which cores are busy."""
    return Link(min(HOST.latency, link.latency), max(HOST.bandwidth, link.bandwidth))


def hidden_hosts(topology: Topology) -> Topology:
    """Returns a topology in which a collective between hosts takes only the seconds during which
    cores are busy with it, as if the rest ran beside compute."""
    inner, *outer = topology.levels
    return replace(topology, levels=(inner, *map(_by_cores, outer)))


def _by_cores(level: Level) -> Level:
    link = by_cores(Link(level.latency, level.bandwidth))
    measured = {kind: by_cores(link) for kind, link in level.collectives.items()}
    return replace(level, latency=link.latency, bandwidth=link.bandwidth, collectives=measured)


def _spread(ranks: int, hosts: int) -> Spread:
    """Returns the Spread of `ranks` ranks over hosts, with equally many on each host (rounded
    up)."""
    return Spread(-(-ranks // hosts), hosts)


def _over_hosts(kind: str, spread: Spread, inside: Link, between: Link, size: float) -> float:
    """Returns the seconds of a collective over several hosts, with the links `inside` and `between`
    hosts."""
    seconds = _overlapped(stages(kind, spread, size), inside, between)
    if kind == "AllReduce":  # no jump of costs where the plugin changes its algorithm
        return min(seconds, _overlapped(_scattered_sums(spread, size), inside, between))
    return seconds


def _overlapped(pair: tuple[_Stage, _Stage], inside: Link, between: Link) -> float:
    """Returns the seconds of two stages that overlap: their bytes move at the same time, while
    their rounds come one after the other."""
    (rounds, near), (between_rounds, away) = pair
    latency = rounds * inside.latency + between_rounds * between.latency
    return latency + max(near / inside.bandwidth, away / between.bandwidth)


def _transfer(kind: str, ranks: int, link: Link, size: float) -> float:
    """Returns the seconds of a collective of `ranks` ranks of one host."""
    rounds, sent = messages(kind, ranks, size)
    seconds = rounds * link.latency + sent / link.bandwidth
    if kind == "AllReduce":  # no jump of costs where the plugin changes its algorithm
        return min(seconds, 2 * link.latency + bytes_sent(kind, ranks, size) / link.bandwidth)
    return seconds


def _roofline(device: Device, flops: float, size: float, far: float, convolves: bool) -> float:
    """Returns the seconds of an op on a device; parameters as for `Costs.compute`."""
    rate = device.convolution if convolves and device.convolution else device.flops
    return device.launch + device.roofline(flops / rate, size, far)
