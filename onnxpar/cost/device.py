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
"""Bytes of contiguous memory that a device copies in the time that an additional row costs
(`Device.row`)."""


@dataclass(frozen=True)
class Rate:
    """Additional seconds of an op of some kind for each row and each element, beyond the time that
    its operations, its bytes and `Device.row` explain."""

    row: float = 0.0
    element: float = 0.0


NO_RATE = Rate()


@dataclass(frozen=True)
class Device:
    """The speed of a rank's device; by default about one CPU core of 2020.

    flops             operations per second (a multiplication and addition counts as two)
    memory_bandwidth  bytes read or written per second
    launch            least seconds of every op
    memory            bytes of memory of a rank; None: unknown
    convolution       operations per second of convolutions; None: the same as `flops`
    channels          number of output channels that convolutions compute at once; fewer channels
                      take as long; None: any number
    row               additional seconds for each row, a stretch of contiguous elements that an op
                      copies, multiplies or normalizes on its own; None: the time to copy ROW_BYTES
    cache             bytes that an op reads and writes at `cache_bandwidth`; further bytes move at
                      `memory_bandwidth`; None: no cache
    exposed           share of the time to move bytes that are in no cache in which an op cannot
                      compute, up to 1; None: it always can (the roofline model)
    ops               the rates of kinds of ops that were measured separately, of RATED
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
        """The device on which all work takes `times` as long, because ranks take turns."""
        quantities: dict[str, Any] = {
            name: value * times if unit == "s" else value / times
            for name, unit in DEVICE_UNITS.items()
            if unit in ("s", *_RATES) and (value := getattr(self, name)) is not None
        }
        ops = {kind: Rate(r.row * times, r.element * times) for kind, r in self.ops.items()}
        return replace(self, ops=ops, **quantities)

    def between(self, other: Device, share: float) -> Device:
        """A device between this one and another: quantities are interpolated on a logarithmic
        scale, and `share` 1 is the other device."""

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
        """Seconds of an op that computes for `compute` seconds, and reads and writes `size` bytes,
        of which `far` bytes are in no cache."""
        near, rest = self.move(size - far), far / self.memory_bandwidth
        hidden, exposed = max(compute, near + rest), max(compute, near) + rest
        return hidden + (self.exposed or 0.0) * (exposed - hidden)


RATED = ("Softmax", "LayerNormalization", "Erf", "Transpose", "MatMul")
"""Kinds of ops that may have a rate. `search/rated_ops.py` says what their rows and elements
are."""
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
"""Quantities of a device in a file."""


@dataclass(frozen=True)
class Listed:
    """The entry `device` at one place in a topology file: `same` for all ranks there, or `by_unit`
    with an item for each unit. `where` names the place in errors."""

    same: Settings
    by_unit: tuple[Settings, ...]
    where: str

    @staticmethod
    def read(data: Any, where: str) -> Listed:
        """Reads the entry: a mapping of quantities, or a list of such mappings. In a list, `count`
        makes an item stand for several neighbouring units. Errors: StrategyError."""
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
        """Raises StrategyError if the list has more or fewer items than there are units."""
        if self.by_unit and len(self.by_unit) != units:
            raise StrategyError(
                f"{self.where}: lists {len(self.by_unit)} devices, but there are {units} {what}; "
                "list one for each, or give an entry a count"
            )


def devices_of(
    top: Listed, levels: Sequence[tuple[Listed, int | None]]
) -> tuple[Device, tuple[Device, ...]]:
    """The device of all ranks, and the devices of each rank if they differ. `top` is the entry of
    the whole file; `levels` has the entry and the size of each level, from the inside out. An inner
    entry overrides an outer one, and a list by rank overrides all. Errors: StrategyError."""
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
    """The device that an entry of a file describes. Errors: StrategyError."""
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
