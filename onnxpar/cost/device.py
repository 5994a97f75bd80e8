"""The speed and memory of a rank's device, and the devices of all ranks as topology files give
them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.cost.entries import mapping, number
from onnxpar.layout.mesh import MOST_RANKS

ROW_BYTES = 100
"""Bytes of contiguous memory that can be copied in the time that one more row costs
(`Device.row`)."""


@dataclass(frozen=True)
class Rate:
    """Seconds that an op of a kind takes for each row and each element, beyond what its operations,
    its bytes and `Device.row` account for."""

    row: float = 0.0
    element: float = 0.0


NO_RATE = Rate()


@dataclass(frozen=True)
class Device:
    """The speed of a rank's device; by default about one CPU core of 2020.

    flops             operations per second (a multiplication and addition counts as two)
    memory_bandwidth  bytes read or written per second
    launch            seconds that every op takes at least
    memory            bytes that a rank has; None: unknown
    convolution       operations per second of convolutions; None: the same as `flops`
    channels          convolutions compute this many output channels at once, and so as many for a
                      part of them; None: exactly those that there are
    row               additional seconds for each row, a stretch of contiguous elements that is
                      copied, multiplied or normalized on its own; None: the time to copy ROW_BYTES
    cache             bytes that an op reads and writes at `cache_bandwidth`; the rest moves at
                      `memory_bandwidth`; None: all of it
    exposed           share of the time to move bytes that no cache holds in which an op cannot
                      compute, up to 1; None: it always can (the roofline model)
    ops               the rates of kinds of ops that were measured by themselves, of RATED
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
        """The device where everything takes so many times as long, because ranks take turns."""
        found: dict[str, Any] = {
            name: value * times if unit == "s" else value / times
            for name, unit in DEVICE_UNITS.items()
            if unit in ("s", *_RATES) and (value := getattr(self, name)) is not None
        }
        ops = {kind: Rate(r.row * times, r.element * times) for kind, r in self.ops.items()}
        return replace(self, ops=ops, **found)

    def between(self, other: Device, share: float) -> Device:
        """The device that is so far on the way to another one, in proportion."""

        def mean(one: float, two: float) -> float:
            return math.exp((1 - share) * math.log(one) + share * math.log(two))

        both = {name: (getattr(self, name), getattr(other, name)) for name in DEVICE_UNITS}
        found: dict[str, Any] = {
            name: mean(*values) for name, values in both.items() if all(values)
        }
        return replace(self, **found)

    def move(self, size: float) -> float:
        """Seconds to read or write `size` bytes."""
        if self.cache is None or self.cache_bandwidth is None:
            return size / self.memory_bandwidth
        near = min(size, self.cache)
        return near / self.cache_bandwidth + (size - near) / self.memory_bandwidth

    def roofline(self, compute: float, size: float, far: float) -> float:
        """Seconds of an op that computes for `compute` seconds, and reads and writes `size` bytes,
        `far` of which no cache holds."""
        near, rest = self.move(size - far), far / self.memory_bandwidth
        hidden, exposed = max(compute, near + rest), max(compute, near) + rest
        return hidden + (self.exposed or 0.0) * (exposed - hidden)


RATED = ("Softmax", "LayerNormalization", "Erf", "Transpose", "MatMul")
"""Kinds of ops that may have a rate. What their rows and elements are: `search/rated_ops.py`."""
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
"""The quantities of a device that a file gives."""


@dataclass(frozen=True)
class Listed:
    """The entry `device` of one place in a topology file: `same` for all ranks there, or `each`
    with one item for each unit; `where` names the place in errors."""

    same: Settings
    each: tuple[Settings, ...]
    where: str

    @staticmethod
    def read(data: Any, where: str) -> Listed:
        """Reads the entry: a mapping of quantities, or a list of such mappings, in which `count`
        makes an item stand for several neighbours. Errors: StrategyError."""
        if not isinstance(data, list):
            return Listed(_settings(data or {}, where), (), where)
        each: list[Settings] = []
        for i, item in enumerate(data):
            entries = mapping(item, (*DEVICE_UNITS, "ops", "count"), f"{where}[{i}]")
            count = entries.get("count", 1)
            if type(count) is not int or not 1 <= count <= MOST_RANKS:
                raise StrategyError(
                    f"{where}[{i}]: count is {count!r}; give a number from 1 to {MOST_RANKS:,}"
                )
            own = {key: value for key, value in entries.items() if key != "count"}
            each += [_settings(own, f"{where}[{i}]")] * count
        if not each:
            raise StrategyError(f"{where}: the list is empty; give one entry for each unit")
        return Listed({}, tuple(each), where)

    def check(self, units: int, what: str) -> None:
        """Errors: StrategyError if the list has another number of items than there are units."""
        if self.each and len(self.each) != units:
            raise StrategyError(
                f"{self.where}: lists {len(self.each)} devices, but there are {units} {what}; list "
                "one for each, or give an entry a count"
            )


def devices_of(
    top: Listed, levels: Sequence[tuple[Listed, int | None]]
) -> tuple[Device, tuple[Device, ...]]:
    """The device of all ranks, and the devices of each rank if they differ. `top` is the entry of
    the whole file, `levels` those of the levels with their sizes, from the inside out. An inner
    entry overrides an outer one, and a list by rank overrides all. Errors: StrategyError."""
    sizes = [size for _, size in levels]
    common = dict(top.same)
    for listed, _ in reversed(levels):
        common |= listed.same
    if not top.each and not any(listed.each for listed, _ in levels):
        return Device(**common), ()
    ranks = math.prod(size or 1 for size in sizes)
    if ranks > MOST_RANKS:
        raise StrategyError(f"{top.where}: {ranks:,} ranks; give at most {MOST_RANKS:,}")
    top.check(ranks, "ranks")
    for listed, size in levels:
        listed.check(size or 1, "units in this level")
    found = tuple(_device_of(rank, top, levels) for rank in range(ranks))
    return (found[0], ()) if len(set(found)) == 1 else (Device(**common), found)


def _device_of(rank: int, top: Listed, levels: Sequence[tuple[Listed, int | None]]) -> Device:
    settings: dict[str, Any] = dict(top.same)
    units = [math.prod(size or 1 for _, size in levels[:i]) for i in range(len(levels))]
    for (listed, size), unit in reversed(list(zip(levels, units, strict=True))):
        settings |= listed.same
        settings |= listed.each[rank // unit % (size or 1)] if listed.each else {}
    return Device(**{**settings, **(top.each[rank] if top.each else {})})


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
