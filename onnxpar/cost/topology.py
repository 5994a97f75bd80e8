"""The hardware of ranks: levels of links between them, and the speed of a rank's device."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.base.plain_yaml import parse, read_text
from onnxpar.base.units import text_of
from onnxpar.base.unreadable import cannot_read
from onnxpar.cost.device import DEVICE_UNITS, Listed, device_in, devices_of
from onnxpar.cost.device import Device as Device
from onnxpar.cost.machines import is_machine, machine
from onnxpar.cost.rank_table import hosts_of, is_rank_table
from onnxpar.cost.topology_entries import mapping, number
from onnxpar.graph.collectives import KINDS


@dataclass(frozen=True)
class Link:
    """A rank's connection to other ranks.

    latency    seconds until the first byte of a round arrives
    bandwidth  bytes per second while all ranks of the level send
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Session:
    """The overhead of a run in a session, beside the work of ranks: `latency` seconds, `rank`
    seconds for each rank, and the passing of inputs and outputs at `bandwidth` bytes per second."""

    latency: float
    bandwidth: float
    rank: float = 0.0

    def of_ranks(self, ranks: int) -> Link:
        """Returns the overhead of a run over `ranks` ranks of a host, as latency and bandwidth."""
        return Link(self.latency + self.rank * ranks, self.bandwidth)


@dataclass(frozen=True)
class Level:
    """A level of the topology, such as host or rack. One unit of a level (a rack) consists of
    `size` units of the next inner level (hosts; in the innermost level, ranks), which communicate
    over links with this latency and bandwidth.

    size         None: as many as the ranks need
    collectives  the links of kinds of collectives that were measured separately
    at_once      how many ranks a host runs at the full speed of their devices; more take turns;
                 None: all
    """

    name: str
    size: int | None
    latency: float
    bandwidth: float
    collectives: Mapping[str, Link] = field(default_factory=dict)
    at_once: int | None = None

    def link(self, kind: str) -> Link:
        """Returns the link that was measured for a kind of collective, else the link of the
        level."""
        return self.collectives.get(kind) or Link(self.latency, self.bandwidth)


HOST = Link(50e-6, 2e9)
"""Default link between ranks of a host: Gloo over the loopback device."""
NETWORK = Link(100e-6, 1e9)
"""Default link between hosts: an Ethernet of 10 Gbit/s that few ranks share."""
CONSTANTS = "built-in constants, for slow cores of one host"
"""The origin of the default topology, as plans name it."""
ANY_HOST = "built-in constants, for a plan that is the same on every machine and promises no times"
"""The origin of the default topology, as plans name it that must not depend on the host."""

_LINKED = tuple(kind.name for kind in KINDS.values() if kind.has_link)
"""Kinds of collectives to which a level may give links of their own."""
_LINK_UNITS = {"latency": "s", "bandwidth": "B/s"}
_SESSION_UNITS = {"latency": "s", "rank": "s", "bandwidth": "B/s"}


@dataclass(frozen=True)
class Topology:
    """The hardware of the ranks: levels of links from the innermost to the outermost, and the
    device of each rank. Neighbouring ranks are on one host: rank r is on host r // (ranks per
    host).

    device   the device of every rank, unless there are `devices`
    devices  the device of each rank, if they differ
    shares   the share of the work that each rank takes; empty: all take the same
    alone    the device of a single rank that has all cores of a host; None: `device`
    session  the overhead of a run in a session; None: unknown
    turns    as `for_ranks` returns it: how many ranks take turns on a core
    origin   where the figures come from, in words

    >>> Topology.of({"levels": [{"name": "host", "latency": "50 us", "bandwidth": "2 GB/s"}]})
    ... # doctest: +ELLIPSIS
    Topology(levels=(Level(name='host', size=None, ...
    """

    levels: tuple[Level, ...]
    device: Device = field(default_factory=Device)
    devices: tuple[Device, ...] = ()
    shares: tuple[float, ...] = ()
    alone: Device | None = None
    session: Session | None = None
    turns: float = 1.0
    origin: str = field(default="the given topology", compare=False)

    @staticmethod
    def default() -> Topology:
        """Returns one host for any number of ranks, with the link HOST and the default device."""
        host = Level("host", None, HOST.latency, HOST.bandwidth)
        return Topology((host,), origin=CONSTANTS)

    @staticmethod
    def from_argument(
        topology: str | os.PathLike[str] | Mapping[str, Any] | Topology | None,
        ranks: int | None = None,
    ) -> Topology | None:
        """Returns the topology that a caller passed: a file, a mapping with the content of a file,
        a Topology, None (stays None), or the name of machines, on which `ranks` ranks run. Errors:
        StrategyError."""
        if isinstance(topology, Mapping):
            return Topology.of(topology)
        if isinstance(topology, str) and is_machine(topology):
            parsed = Topology.of(machine(topology, ranks))
            return replace(parsed, origin=f"built-in figures of {topology}")
        if isinstance(topology, (str, os.PathLike)):
            return Topology.read(topology)
        return topology

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Topology:
        """Reads a topology file (YAML), or a rank table of MindSpore or HCCL (JSON). Errors:
        StrategyError that names the file and the mistake."""
        try:
            text = read_text(path)
            is_json = text.lstrip().startswith("{")
            data = json.loads(text) if is_json else parse(text)
        except OSError as error:
            raise StrategyError(cannot_read(path, error)) from None
        except json.JSONDecodeError as error:
            raise StrategyError(f"{path}: not JSON: {error}") from None
        except (ValueError, RecursionError) as error:
            raise StrategyError(f"{path}: {error}") from None
        return replace(Topology.of(data, os.fspath(path)), origin=os.path.basename(path))

    @staticmethod
    def of(data: Any, source: str = "topology") -> Topology:
        """Returns the topology with the content of a topology file or rank table. `source` names it
        in errors. Errors: StrategyError."""
        if is_rank_table(data):
            return _of_rank_table(data, source)
        entries = mapping(data, ("levels", "device", "alone", "session"), source)
        entry_list = entries.get("levels")
        if "levels" not in entries and entries.get("device"):
            entry_list = [{"name": "host", "latency": HOST.latency, "bandwidth": HOST.bandwidth}]
        if not isinstance(entry_list, list) or not entry_list:
            raise StrategyError(
                f"{source}: levels must be a list of at least one level, the innermost first"
            )
        levels = [_level(entry, f"{source}: levels[{i}]") for i, entry in enumerate(entry_list)]
        names = [level.name for level in levels]
        for name in names:
            if names.count(name) > 1:
                raise StrategyError(
                    f"{source}: two levels are named '{name}'; give each its own name"
                )
        top = Listed.read(entries.get("device"), f"{source}: device")
        listed_devices = [
            Listed.read(entry.get("device"), f"{source}: levels[{i}]: device")
            for i, entry in enumerate(entry_list)
        ]
        _check_inner_sizes(levels, source)
        levels[-1] = _sized(levels, listed_devices, top, source)
        by_level = [
            (listed, level.size) for listed, level in zip(listed_devices, levels, strict=True)
        ]
        alone, session = entries.get("alone"), entries.get("session")
        return Topology(
            tuple(levels),
            *devices_of(top, by_level),
            alone=None if alone is None else device_in(alone, f"{source}: alone"),
            session=None if session is None else _session(session, f"{source}: session"),
        )

    def for_ranks(self, ranks: int) -> Topology:
        """Returns the topology while `ranks` ranks run. They share the cores of their hosts: few
        ranks are faster, and more ranks than cores take turns. Ranks that take turns must be woken
        for each collective and each run."""
        host, *outer = self.levels
        if host.at_once is None or self.devices:
            return self
        here = min(ranks, host.size or ranks)
        turns = max(here / host.at_once, 1.0)
        device = self.device.slowed(turns)
        if self.alone is not None and here < host.at_once:
            share = math.log(here) / math.log(host.at_once)
            device = self.alone.between(self.device, share)
        woken = 0.0
        if self.session is not None and turns > 1:
            woken = self.session.of_ranks(host.at_once).latency
        links = {kind: _slowed(link, turns, woken) for kind, link in host.collectives.items()}
        link = _slowed(Link(host.latency, host.bandwidth), turns, woken)
        session = self.session
        if session is not None:
            run = session.of_ranks(here)
            session = Session(run.latency, run.bandwidth / turns)
        level = Level(host.name, host.size, link.latency, link.bandwidth, links)
        return replace(self, levels=(level, *outer), device=device, session=session, turns=turns)

    @property
    def ranks(self) -> int | None:
        """The number of ranks in all; None if the outermost level has no size."""
        sizes = [level.size for level in self.levels if level.size is not None]
        return math.prod(sizes) if len(sizes) == len(self.levels) else None

    def units(self) -> list[int]:
        """Returns the number of ranks in a unit of each level but the outermost: [4, 32] for hosts
        of 4 ranks and racks of 8 hosts."""
        sizes = [level.size or 1 for level in self.levels[:-1]]
        return [math.prod(sizes[: i + 1]) for i in range(len(sizes))]

    def device_of(self, rank: int) -> Device:
        """Returns the device of a rank."""
        return self.devices[rank] if self.devices else self.device

    def of_ranks(self, ranks: int) -> tuple[Device, ...]:
        """Returns the different devices of the first `ranks` ranks, each once."""
        return tuple(dict.fromkeys(self.devices[:ranks])) or (self.device,)

    def check(self, ranks: int) -> None:
        """Raises StrategyError if the topology has fewer than `ranks` ranks."""
        if self.devices and len(self.devices) < ranks:
            raise StrategyError(
                f"the topology has devices for {len(self.devices)} ranks, but the mesh has "
                f"{ranks}; use fewer ranks, or give a device for each rank"
            )
        if self.ranks is not None and self.ranks < ranks:
            outermost = self.levels[-1]
            raise StrategyError(
                f"the topology has {self.ranks} ranks, but the mesh has {ranks}; use fewer ranks, "
                f"or leave out the size of '{outermost.name}' in the topology, which is then as "
                "large as needed"
            )

    def text(self) -> str:
        """Returns the topology as the text of a file that `read` accepts, with six digits per
        quantity."""
        lines = ["levels:  # from the inside out"]
        for level in self.levels:
            lines.append(f"  - name: {json.dumps(level.name)}")
            if level.size is not None:
                lines.append(f"    size: {level.size}")
            if level.at_once is not None:
                lines.append(f"    at_once: {level.at_once}")
            lines.append(f"    latency: {text_of(level.latency, 's')}")
            lines.append(f"    bandwidth: {text_of(level.bandwidth, 'B/s')}")
            lines += ["    collectives:"] if level.collectives else []
            for kind, link in level.collectives.items():
                latency, bandwidth = text_of(link.latency, "s"), text_of(link.bandwidth, "B/s")
                lines.append(f"      {kind}: {{latency: {latency}, bandwidth: {bandwidth}}}")
        lines.append("device:  # of each rank" if self.devices else "device:  # one rank")
        for device, group in groupby(self.devices or (self.device,)):
            marks = [f"count: {count}"] if (count := len(list(group))) > 1 else []
            marks += _device_lines(device)
            first = "  - " if self.devices else "  "
            lines += [f"{first if not i else ' ' * len(first)}{m}" for i, m in enumerate(marks)]
        if self.alone is not None:
            lines += ["alone:  # one rank that has all cores of a host"]
            lines += [f"  {line}" for line in _device_lines(self.alone)]
        if self.session is not None:
            values = ((key, getattr(self.session, key)) for key in _SESSION_UNITS)
            texts = (f"{key}: {text_of(value, _SESSION_UNITS[key])}" for key, value in values)
            lines.append(f"session: {{{', '.join(texts)}}}  # of each run")
        return "\n".join(lines) + "\n"


def _slowed(link: Link, times: float, least: float = 0.0) -> Link:
    return Link(max(link.latency, least) * times, link.bandwidth / times)


def _device_lines(device: Device) -> list[str]:
    lines = []
    for name, unit in DEVICE_UNITS.items():
        value = getattr(device, name)
        lines += [f"{name}: {text_of(value, unit)}"] if value is not None else []
    lines += ["ops:"] if device.ops else []
    for kind, rate in device.ops.items():
        row, element = text_of(rate.row, "s"), text_of(rate.element, "s")
        lines.append(f"  {kind}: {{row: {row}, element: {element}}}")
    return lines


def _of_rank_table(data: Any, source: str) -> Topology:
    """Returns a topology with the hosts of a rank table and with default speeds, as rank tables
    have none."""
    hosts, devices = hosts_of(data, source)
    host = Level("host", devices, HOST.latency, HOST.bandwidth)
    if hosts == 1:
        return Topology((host,))
    return Topology((host, Level("cluster", hosts, NETWORK.latency, NETWORK.bandwidth)))


def _check_inner_sizes(levels: Sequence[Level], source: str) -> None:
    for level in levels[:-1]:
        if level.size is None:
            raise StrategyError(
                f"{source}: level '{level.name}' has no size, which only the outermost level "
                "may omit; give the number of units in it"
            )


def _sized(
    levels: Sequence[Level], listed_devices: Sequence[Listed], top: Listed, source: str
) -> Level:
    """Returns the outermost level; if it has no size, with the size that follows from a list of
    devices.

    listed_devices  the entry `device` of each level
    top             the entry `device` of the whole file

    Errors: StrategyError if devices differ and the number of ranks is unknown.
    """
    outermost, inner = levels[-1], math.prod(level.size or 1 for level in levels[:-1])
    if outermost.size is not None:
        return outermost
    if listed_devices[-1].by_unit:
        return replace(outermost, size=len(listed_devices[-1].by_unit))
    if top.by_unit:
        if len(top.by_unit) % inner:
            raise StrategyError(
                f"{top.where}: lists {len(top.by_unit)} devices, which do not fill units of "
                f"{inner} ranks of the level '{outermost.name}'; list one device for each rank"
            )
        return replace(outermost, size=len(top.by_unit) // inner)
    if any(listed.by_unit for listed in listed_devices):
        raise StrategyError(
            f"{source}: devices differ, and level '{outermost.name}' has no size; give it, so that "
            "each rank has a device"
        )
    return outermost


def _link(data: Any, where: str) -> Link:
    entries = mapping(data, tuple(_LINK_UNITS), where)
    return Link(**{key: number(entries, key, unit, where) for key, unit in _LINK_UNITS.items()})


def _session(data: Any, where: str) -> Session:
    entries = {"rank": 0, **mapping(data, tuple(_SESSION_UNITS), where)}
    values = {key: number(entries, key, unit, where) for key, unit in _SESSION_UNITS.items()}
    return Session(**values)


def _level(data: Any, where: str) -> Level:
    keys = ("name", "size", "at_once", *_LINK_UNITS, "collectives", "device")
    entries = mapping(data, keys, where)
    name, size, at_once = (entries.get(key) for key in ("name", "size", "at_once"))
    if not isinstance(name, str) or not name:
        raise StrategyError(f"{where}: name is missing; write host, rack or the like")
    for key, count in (("size", size), ("at_once", at_once)):
        if count is not None and (type(count) is not int or count < 1):
            raise StrategyError(f"{where}: {key} is {count!r}; it must be an integer of at least 1")
    link = _link({key: entries.get(key) for key in _LINK_UNITS}, where)
    kinds = mapping(entries.get("collectives") or {}, _LINKED, f"{where}: collectives")
    links = {kind: _link(link, f"{where}: {kind}") for kind, link in kinds.items()}
    return Level(name, size, link.latency, link.bandwidth, links, at_once)
