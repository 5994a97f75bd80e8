"""The hardware of ranks: levels of links between them, and the speed of a rank's device."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxpar.base.plain_yaml import parse
from onnxpar.base.units import quantity, text_of
from onnxpar.cost.rank_table import hosts_of, is_rank_table
from onnxpar.errors import StrategyError
from onnxpar.files.unreadable import cannot_read
from onnxpar.ir.collectives import KINDS


@dataclass(frozen=True)
class Link:
    """A rank's connection to others: `latency` in seconds until the first byte of a round arrives,
    and `bandwidth` in bytes per second while all ranks of the level send."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Level:
    """A level of the topology, such as a host or a rack. A unit of it consists of `size` units of
    the next inner level (of ranks, in the innermost level), which communicate over links with this
    latency and bandwidth. A `size` of None means as many as there are ranks for. `collectives` has
    the links of kinds of collectives that were measured by themselves."""

    name: str
    size: int | None
    latency: float
    bandwidth: float
    collectives: Mapping[str, Link] = field(default_factory=dict)

    def link(self, kind: str) -> Link:
        """The measured link of a kind of collective, or the link of the level."""
        return self.collectives.get(kind) or Link(self.latency, self.bandwidth)


HOST = Link(50e-6, 2e9)
"""Default link between ranks of a host: Gloo over the loopback device."""
NETWORK = Link(100e-6, 1e9)
"""Default link between hosts: an Ethernet of 10 Gbit/s that few ranks share."""


ROW_BYTES = 100
"""Bytes of contiguous memory that can be copied in the time that one more row costs
(`Device.row`)."""


@dataclass(frozen=True)
class Device:
    """The speed of a rank's device; by default about one CPU core of 2020.

    flops             operations per second (a multiplication and addition counts as two)
    memory_bandwidth  bytes read or written per second
    launch            seconds that every op takes at least
    memory            bytes that a rank has; None: unknown
    convolution       operations per second of convolutions; None: the same as `flops`
    row               additional seconds for each row, a stretch of contiguous elements that is
                      copied, multiplied or normalized on its own; None: the time to copy ROW_BYTES
    """

    flops: float = 2e10
    memory_bandwidth: float = 1e10
    launch: float = 5e-6
    memory: float | None = None
    convolution: float | None = None
    row: float | None = None


_LINKED = tuple(kind.name for kind in KINDS.values() if kind.has_link)
"""Kinds of collectives for which a level may have links."""
_DEVICE_UNITS = {
    "flops": "FLOP/s",
    "convolution": "FLOP/s",
    "memory_bandwidth": "B/s",
    "row": "s",
    "launch": "s",
    "memory": "B",
}
_LINK_UNITS = {"latency": "s", "bandwidth": "B/s"}


@dataclass(frozen=True)
class Topology:
    """The hardware of the ranks: levels of links from the innermost to the outermost, and the
    device that every rank has. Neighbouring ranks are on one host: rank r is on host r // (ranks
    per host).

    >>> Topology.of({"levels": [{"name": "host", "latency": "50 us", "bandwidth": "2 GB/s"}]})
    ... # doctest: +ELLIPSIS
    Topology(levels=(Level(name='host', size=None, ...
    """

    levels: tuple[Level, ...]
    device: Device = Device()

    @staticmethod
    def default() -> Topology:
        """One host of any number of ranks, on HOST links."""
        return Topology((Level("host", None, HOST.latency, HOST.bandwidth),))

    @staticmethod
    def given(
        topology: str | os.PathLike[str] | Mapping[str, Any] | Topology | None,
    ) -> Topology | None:
        """The topology that a caller gives: a file, its structure in Python, or a Topology."""
        if isinstance(topology, Mapping):
            return Topology.of(topology)
        if isinstance(topology, (str, os.PathLike)):
            return Topology.read(topology)
        return topology

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Topology:
        """Reads a topology file (YAML), or a rank table of MindSpore or HCCL (JSON). Errors:
        StrategyError that names the file and the mistake."""
        try:
            text = Path(path).read_text()
            is_json = text.lstrip().startswith("{")
            data = json.loads(text) if is_json else parse(text)
        except OSError as error:
            raise StrategyError(cannot_read(path, error)) from None
        except json.JSONDecodeError as error:
            raise StrategyError(f"{path}: not JSON: {error}") from None
        except (ValueError, RecursionError) as error:
            raise StrategyError(f"{path}: {error}") from None
        return Topology.of(data, os.fspath(path))

    @staticmethod
    def of(data: Any, source: str = "topology") -> Topology:
        """A topology from the structure of a topology file or rank table. Errors: StrategyError."""
        if is_rank_table(data):
            return _of_rank_table(data, source)
        entries = _mapping(data, ("levels", "device"), source)
        found = entries.get("levels")
        if not isinstance(found, list) or not found:
            raise StrategyError(
                f"{source}: levels must be a list of at least one level, the innermost first"
            )
        levels = [_level(entry, f"{source}: levels[{i}]") for i, entry in enumerate(found)]
        for level in levels[:-1]:
            if level.size is None:
                raise StrategyError(
                    f"{source}: level '{level.name}' has no size, which only the outermost level "
                    "may omit; give the number of units in it"
                )
        names = [level.name for level in levels]
        for name in names:
            if names.count(name) > 1:
                raise StrategyError(
                    f"{source}: two levels are named '{name}'; give each its own name"
                )
        return Topology(tuple(levels), _device(entries.get("device") or {}, f"{source}: device"))

    @property
    def ranks(self) -> int | None:
        """Number of ranks; None if the outermost level has no size."""
        sizes = [level.size for level in self.levels if level.size is not None]
        return math.prod(sizes) if len(sizes) == len(self.levels) else None

    def units(self) -> list[int]:
        """Number of ranks in one unit of each level but the outermost."""
        sizes = [level.size or 1 for level in self.levels[:-1]]
        return [math.prod(sizes[: i + 1]) for i in range(len(sizes))]

    def check(self, ranks: int) -> None:
        """Checks that the topology has this number of ranks. Errors: StrategyError if it has
        fewer."""
        if self.ranks is not None and self.ranks < ranks:
            outermost = self.levels[-1]
            raise StrategyError(
                f"the topology has {self.ranks} ranks, but the mesh has {ranks}; use fewer ranks, "
                f"or leave out the size of '{outermost.name}' in the topology, which is then as "
                "large as needed"
            )

    def text(self) -> str:
        """The topology as the text of a file that `read` accepts; quantities have six digits."""
        lines = ["levels:  # from the inside out"]
        for level in self.levels:
            lines.append(f"  - name: {json.dumps(level.name)}")
            if level.size is not None:
                lines.append(f"    size: {level.size}")
            lines.append(f"    latency: {text_of(level.latency, 's')}")
            lines.append(f"    bandwidth: {text_of(level.bandwidth, 'B/s')}")
            lines += ["    collectives:"] if level.collectives else []
            for kind, link in level.collectives.items():
                latency, bandwidth = text_of(link.latency, "s"), text_of(link.bandwidth, "B/s")
                lines.append(f"      {kind}: {{latency: {latency}, bandwidth: {bandwidth}}}")
        lines.append("device:  # one rank")
        for name, unit in _DEVICE_UNITS.items():
            value = getattr(self.device, name)
            lines += [f"  {name}: {text_of(value, unit)}"] if value is not None else []
        return "\n".join(lines) + "\n"


def _of_rank_table(data: Any, source: str) -> Topology:
    """A topology with the hosts of a rank table and default speeds, because such a table has
    none."""
    hosts, devices = hosts_of(data, source)
    host = Level("host", devices, HOST.latency, HOST.bandwidth)
    if hosts == 1:
        return Topology((host,))
    return Topology((host, Level("cluster", hosts, NETWORK.latency, NETWORK.bandwidth)))


def _mapping(data: Any, keys: tuple[str, ...], where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise StrategyError(f"{where}: must be a mapping with the keys {', '.join(keys)}")
    unknown = sorted(set(map(str, data)) - set(keys))
    if unknown:
        raise StrategyError(f"{where}: unknown key {unknown[0]!r}; use {', '.join(keys)}")
    return data


def _number(entries: Mapping[str, Any], key: str, unit: str, where: str) -> float:
    """The quantity `key` of a mapping, in `unit`. Errors: StrategyError if it is missing, negative,
    or 0 and not a time."""
    if entries.get(key) is None:
        raise StrategyError(f"{where}: {key} is missing; give it in {unit}")
    value = quantity(entries[key], unit, f"{where}: {key}")
    if value < 0 or (value == 0 and unit != "s"):
        least = "at least" if unit == "s" else "above"
        raise StrategyError(f"{where}: {key} is {entries[key]!r}; it must be {least} 0")
    return value


def _link(data: Any, where: str) -> Link:
    entries = _mapping(data, tuple(_LINK_UNITS), where)
    return Link(**{key: _number(entries, key, unit, where) for key, unit in _LINK_UNITS.items()})


def _level(data: Any, where: str) -> Level:
    entries = _mapping(data, ("name", "size", *_LINK_UNITS, "collectives"), where)
    name, size = entries.get("name"), entries.get("size")
    if not isinstance(name, str) or not name:
        raise StrategyError(f"{where}: name is missing; write host, rack or the like")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise StrategyError(f"{where}: size is {size!r}; it must be an integer of at least 1")
    own = _link({key: entries.get(key) for key in _LINK_UNITS}, where)
    kinds = _mapping(entries.get("collectives") or {}, _LINKED, f"{where}: collectives")
    links = {kind: _link(link, f"{where}: {kind}") for kind, link in kinds.items()}
    return Level(name, size, own.latency, own.bandwidth, links)


def _device(data: Any, where: str) -> Device:
    entries = _mapping(data, tuple(_DEVICE_UNITS), where)
    given = {
        key: _number(entries, key, unit, where)
        for key, unit in _DEVICE_UNITS.items()
        if entries.get(key) is not None
    }
    return Device(**given)
