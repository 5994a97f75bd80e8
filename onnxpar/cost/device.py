"""The speed and memory of a rank's device, and the devices of all ranks in a topology file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.cost.topology_entries import mapping, number
from onnxpar.layout.mesh import MOST_RANKS

ROW_BYTES = 100
"""By default, an additional row costs the time in which the device copies this many contiguous
bytes."""


@dataclass(frozen=True)
class Rate:
    """Additional seconds of an op of some kind, per row and per element, beyond what `Device`
    explains by operations, bytes and rows."""

    row: float = 0.0
    element: float = 0.0


NO_RATE = Rate()


@dataclass(frozen=True)
class Device:
    """The speed of a rank's device; by default about one CPU core of 2020.

    flops             operations per second (a multiplication and an addition count as two)
    memory_bandwidth  bytes read or written per second
    launch            least seconds of every op
    memory            bytes of memory of a rank; None: unknown
    convolution       operations per second of convolutions; None: as `flops`
    channels          number of output channels that a convolution computes at once, so that fewer
                      take as long; None: any number is efficient
    row               additional seconds per row, a run of contiguous elements that an op copies,
                      multiplies or normalizes on its own; None: the time to copy ROW_BYTES
    cache             bytes that an op reads and writes at `cache_bandwidth`; further bytes move at
                      `memory_bandwidth`; None: no cache
    exposed           fraction, up to 1, of the time to move bytes that are in no cache during which
                      an op cannot compute; None: it always can (the roofline model)
    ops               rates of kinds of ops in RATED that were measured separately
    """

    flops: float = 2e10
    memory_bandwidth: float = 1e10
    launch: float = 5e-6
    memory: float | None = None
    convolution: float | None = None
    row: float | None = None
    channels: float | None = None
    cache: float | None = None
    cache_bandwidth: float | None = None
    exposed: float | None = None
    ops: Mapping[str, Rate] = field(default_factory=dict, hash=False)

    def slowed(self, times: float) -> Device:
        """Returns the device on which all work takes `times` as long, for ranks that take turns on
        cores."""
        quantities: dict[str, Any] = {
            name: value * times if unit == "s" else value / times
            for name, unit in DEVICE_UNITS.items()
            if unit in ("s", *_RATES) and (value := getattr(self, name)) is not None
        }
        ops = {kind: Rate(r.row * times, r.element * times) for kind, r in self.ops.items()}
        return replace(self, ops=ops, **quantities)

    def between(self, other: Device, share: float) -> Device:
        """Returns a device between this one (`share` 0) and another (`share` 1): each quantity is
        interpolated on a logarithmic scale."""

        def mean(a: float, b: float) -> float:
            return math.exp((1 - share) * math.log(a) + share * math.log(b))

        both = {name: (getattr(self, name), getattr(other, name)) for name in DEVICE_UNITS}
        quantities: dict[str, Any] = {
            name: mean(*values) for name, values in both.items() if all(values)
        }
        return replace(self, **quantities)

    def move(self, size: float) -> float:
        """Seconds to read or write `size` bytes."""
        if self.cache is None or self.cache_bandwidth is None:
            return size / self.memory_bandwidth
        near = min(size, self.cache)
        return near / self.cache_bandwidth + (size - near) / self.memory_bandwidth

    def roofline(self, compute: float, size: float, far: float) -> float:
        """Returns the seconds of an op without its launch.

        compute  seconds of its operations
        size     bytes that it reads and writes
        far        part of `size`: bytes that are certainly in no cache
        """
        near, rest = self.move(size - far), far / self.memory_bandwidth
        hidden, exposed = max(compute, near + rest), max(compute, near) + rest
        return hidden + (self.exposed or 0.0) * (exposed - hidden)


RATED = ("Softmax", "LayerNormalization", "Erf", "Transpose", "MatMul")
"""Kinds of ops that may have a rate; `search/rated_ops.py` defines their rows and elements."""
_RATES = ("FLOP/s", "B/s")
DEVICE_UNITS = {
    "flops": "FLOP/s",
    "convolution": "FLOP/s",
    "channels": "",
    "memory_bandwidth": "B/s",
    "cache": "B",
    "cache_bandwidth": "B/s",
    "exposed": "",
    "row": "s",
    "launch": "s",
    "memory": "B",
}
Settings = Mapping[str, Any]
"""Fields of a Device, as read from a file."""


@dataclass(frozen=True)
class Listed:
    """The entry `device` at one place of a topology file: fields that hold for all ranks there
    (`same`), or a list with an item for each unit (`by_unit`). `where` names the place in errors.
    """

    same: Settings
    by_unit: tuple[Settings, ...]
    where: str

    @staticmethod
    def read(data: Any, where: str) -> Listed:
        """Reads the entry: a mapping of quantities, or a list of such mappings, in which `count: 3`
        makes an item stand for three neighbouring units. Errors: StrategyError."""
        if not isinstance(data, list):
            return Listed(_settings(data or {}, where), (), where)
        by_unit: list[Settings] = []
        for i, item in enumerate(data):
            entries = mapping(item, (*DEVICE_UNITS, "ops", "count"), f"{where}[{i}]")
            count = entries.get("count", 1)
            if type(count) is not int or not 1 <= count <= MOST_RANKS:
                raise StrategyError(
                    f"{where}[{i}]: count is {count!r}; give a number from 1 to {MOST_RANKS:,}"
                )
            quantities = {key: value for key, value in entries.items() if key != "count"}
            by_unit += [_settings(quantities, f"{where}[{i}]")] * count
        if not by_unit:
            raise StrategyError(f"{where}: the list is empty; give one entry for each unit")
        return Listed({}, tuple(by_unit), where)

    def check(self, units: int, what: str) -> None:
        """Raises StrategyError unless the list, if there is one, has an item for each of `units`
        units. `what` is the word for them."""
        if self.by_unit and len(self.by_unit) != units:
            raise StrategyError(
                f"{self.where}: lists {len(self.by_unit)} devices, but there are {units} {what}; "
                "list one for each, or give an entry a count"
            )


def devices_of(
    top: Listed, levels: Sequence[tuple[Listed, int | None]]
) -> tuple[Device, tuple[Device, ...]]:
    """Returns the device that all ranks share, and the device of each rank if they differ (else
    empty).

    top     the entry `device` of the whole file
    levels  the entry and the size of each level, from the innermost to the outermost

    An inner level's entry overrides an outer one, and a list by rank in `top` overrides all.
    Errors: StrategyError.
    """
    sizes = [size for _, size in levels]
    common = dict(top.same)
    for listed, _ in reversed(levels):
        common |= listed.same
    if not top.by_unit and not any(listed.by_unit for listed, _ in levels):
        return Device(**common), ()
    ranks = math.prod(size or 1 for size in sizes)
    if ranks > MOST_RANKS:
        raise StrategyError(f"{top.where}: {ranks:,} ranks; give at most {MOST_RANKS:,}")
    top.check(ranks, "ranks")
    for listed, size in levels:
        listed.check(size or 1, "units in this level")
    by_rank = tuple(_device_of(rank, top, levels) for rank in range(ranks))
    return (by_rank[0], ()) if len(set(by_rank)) == 1 else (Device(**common), by_rank)


def _device_of(rank: int, top: Listed, levels: Sequence[tuple[Listed, int | None]]) -> Device:
    settings: dict[str, Any] = dict(top.same)
    units = [math.prod(size or 1 for _, size in levels[:i]) for i in range(len(levels))]
    for (listed, size), unit in reversed(list(zip(levels, units, strict=True))):
        settings |= listed.same
        settings |= listed.by_unit[rank // unit % (size or 1)] if listed.by_unit else {}
    return Device(**{**settings, **(top.by_unit[rank] if top.by_unit else {})})


def device_in(data: Any, where: str) -> Device:
    """Returns the device that an entry of a file describes; `where` names the entry in errors.
    Errors: StrategyError."""
    return Device(**_settings(data, where))


def _settings(data: Any, where: str) -> Settings:
    entries = mapping(data, (*DEVICE_UNITS, "ops"), where)
    settings: dict[str, Any] = {
        key: number(entries, key, unit, where)
        for key, unit in DEVICE_UNITS.items()
        if entries.get(key) is not None
    }
    if settings.get("exposed", 0.0) > 1:
        raise StrategyError(f"{where}: exposed is {entries['exposed']!r}; it must be at most 1")
    if entries.get("ops"):
        ops = mapping(entries["ops"], RATED, f"{where}: ops")
        settings["ops"] = {kind: _rate(rate, f"{where}: {kind}") for kind, rate in ops.items()}
    return settings


def _rate(data: Any, where: str) -> Rate:
    entries = mapping(data, ("row", "element"), where)
    return Rate(**{key: number(entries, key, "s", where) for key in entries})
