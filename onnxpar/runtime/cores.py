"""Division of a host's cores among its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BINDINGS = ("cores", "numa", "none")
"""What a rank can be bound to: its cores, the NUMA nodes of its cores, or nothing."""
SYSTEM = Path("/sys/devices/system")
"""Where Linux describes the machine."""


@dataclass(frozen=True, order=True)
class Core:
    """A core of the machine: its NUMA node, and its hardware threads, by the numbers that Linux
    gives them."""

    node: int
    threads: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """The hardware threads that a rank is bound to (empty: not bound), its number of threads, and
    whether these threads may spin."""

    cores: tuple[int, ...]
    threads: int
    spin: bool


def shares(ranks: int, bind: str = "cores", cores: Sequence[Core] | None = None) -> list[Share]:
    """Returns each rank's share of `cores`, by default of those that this process may use; `bind`
    is one of BINDINGS.

    Cores of one NUMA node stay together, so if the nodes divide the ranks, no rank is on two nodes.
    Linux then takes a rank's memory from its node. A rank has a thread for each core, not for each
    hardware thread, as in onnxruntime; if there are more ranks than cores, ranks share cores.

    With more ranks than hardware threads, each rank has one thread, which never spins: a spinning
    thread would take the core from the rank that it waits for. A rank with one core is bound to the
    cores of its node, or not at all if there is only one node, so that Linux can move it away from
    other processes.
    """
    from onnxpar.layout.layout import nested_parts  # the command `run` starts ranks before NumPy

    cores = sorted(own_cores() if cores is None else cores)
    single = [Core(core.node, (thread,)) for core in cores for thread in core.threads]
    units = cores if ranks <= len(cores) else single
    if ranks > len(units):
        return [Share((), 1, False)] * ranks
    out, start = [], 0
    for count in nested_parts(len(units), (ranks,)):
        own = units[start : start + count]
        if bind == "cores" and count > 1:
            bound = own
        else:
            bound = _beside(own, cores) if bind != "none" else []
        out.append(Share(_threads(bound), count, True))
        start += count
    return out


def _beside(own: Iterable[Core], cores: Iterable[Core]) -> list[Core]:
    """Returns all cores of the nodes of `own`; none if these are all nodes."""
    nodes = {core.node for core in own}
    same = [core for core in cores if core.node in nodes]
    return same if {core.node for core in cores} != nodes else []


def _threads(cores: Iterable[Core]) -> tuple[int, ...]:
    return tuple(sorted(thread for core in cores for thread in core.threads))


def own_cores(system: Path = SYSTEM, own: Iterable[int] | None = None) -> list[Core]:
    """Returns the cores whose hardware threads `own` this process may use, by default those that
    Linux allows it. What Linux does not tell counts as a core of its own, in node 0."""
    left = set(_allowed() if own is None else own)
    nodes = {
        thread: int(found[1])
        for folder in system.glob("node/node*")
        if (found := re.fullmatch(r"node(\d+)", folder.name))
        for thread in _numbers(folder / "cpulist")
    }
    cores = []
    for thread in sorted(left):
        siblings = _numbers(system / f"cpu/cpu{thread}/topology/thread_siblings_list")
        mine = left & {thread, *siblings}
        if thread in mine:
            cores.append(Core(nodes.get(thread, 0), tuple(sorted(mine))))
        left -= mine
    return sorted(cores)


def _allowed() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _numbers(file: Path) -> set[int]:
    """Reads a list of Linux such as `0-3,8`; empty if there is none."""
    try:
        text = file.read_text().strip()
    except OSError:
        return set()
    ends = (part.partition("-") for part in text.split(",") if part)
    return {n for first, _, last in ends for n in range(int(first), int(last or first) + 1)}
