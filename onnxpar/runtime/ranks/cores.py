"""Divides the cores of a host among its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path

from onnxpar.base.errors import InputError

BINDINGS = ("cores", "numa", "none")
"""What a rank may be bound to: its cores, the NUMA nodes of its cores, or nothing."""
SYSTEM = Path("/sys/devices/system")
"""Where Linux describes the machine."""


@dataclass(frozen=True, order=True)
class Core:
    """A core of the machine: the number of its NUMA node, and the numbers of its hardware threads,
    as Linux has them."""

    node: int
    threads: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """The part of a host's cores that a rank uses.

    cores    the numbers of the hardware threads to which the rank is bound; empty: it is not bound
    threads  the number of threads that compute
    spin     True if these threads may spin while they wait
    """

    cores: tuple[int, ...]
    threads: int
    spin: bool


def shares(
    ranks: int, bind: str = "cores", per_node: int = 0, cores: Sequence[Core] | None = None
) -> list[Share]:
    """Returns the share of each of `ranks` ranks in `cores` (None: the cores that this process may
    use).

    bind      one of BINDINGS
    per_node  the number of ranks on each NUMA node; 0: any

    Errors: InputError if `per_node` ranks on each NUMA node are fewer than `ranks`.

    A rank runs on one NUMA node, or on several whole ones if there are fewer ranks than nodes;
    Linux then takes its memory from there. By default, each rank goes where it gets most cores: on
    equal nodes, an equal number to each. The ranks of a node are neighbours, and divide its cores.

    A rank has a thread for each core, not for each hardware thread, as in onnxruntime; if a node
    has more ranks than cores, they share cores. With more ranks than hardware threads, each has one
    thread, which never spins: a spinning thread would take the core from the rank that it waits
    for. A rank with one core is bound to the cores of its node, or not at all if there is only one
    node, so that Linux can move it away from other processes.
    """
    cores = sorted(own_cores() if cores is None else cores)
    nodes = [list(of_node) for _, of_node in groupby(cores, lambda core: core.node)]
    return [
        share
        for own, count in _dealt(ranks, nodes, per_node)
        for share in _divided(own, count, bind, beside=own if len(own) < len(cores) else [])
    ]


def shares_of_replica(
    ranks: int, bind: str, per_node: int, replica: int, replicas: int
) -> list[Share]:
    """Returns the shares of the ranks of one of `replicas` equal sessions, number `replica` from 0.
    The sessions, with `ranks` ranks each, divide the cores that this process may use. Errors: as
    `shares`."""
    return shares(ranks * replicas, bind, per_node)[replica * ranks : (replica + 1) * ranks]


Deal = Iterable[tuple[Sequence[Core], int]]
"""(cores, number of ranks that share them) for each group of ranks, in the order of ranks."""


def _dealt(ranks: int, nodes: Sequence[Sequence[Core]], per_node: int) -> Deal:
    """Returns which NUMA nodes, by their cores, get how many ranks. Errors: InputError if
    `per_node` ranks on each node are too few."""
    if per_node:
        if ranks > per_node * len(nodes):
            raise InputError(
                f"ranks_per_numa {per_node}: this process may use {len(nodes)} NUMA nodes, which "
                f"hold {per_node * len(nodes)} ranks then, but the model has {ranks}; give "
                f"{-(-ranks // len(nodes))} or more"
            )
        left = [max(0, ranks - per_node * before) for before in range(len(nodes))]
        return zip(nodes, [min(per_node, n) for n in left], strict=True)
    if ranks < len(nodes):
        ends = list(accumulate(_equal_parts(len(nodes), ranks)))
        starts = [0, *ends[:-1]]
        return [
            ([core for node in nodes[i:k] for core in node], 1)
            for i, k in zip(starts, ends, strict=True)
        ]
    counts = [0] * len(nodes)
    for _ in range(ranks):
        best = max(range(len(nodes)), key=lambda n: (len(nodes[n]) / (counts[n] + 1), -counts[n]))
        counts[best] += 1
    return zip(nodes, counts, strict=True)


def _divided(own: Sequence[Core], ranks: int, bind: str, beside: Sequence[Core]) -> Iterator[Share]:
    """Yields the share of each of `ranks` ranks in the cores `own`. A rank that does not get
    several cores of its own is bound to the cores `beside`; if there are none, it is not bound."""
    single = [Core(core.node, (thread,)) for core in own for thread in core.threads]
    units = own if ranks <= len(own) else single
    around = _threads(beside if bind != "none" else [])
    if ranks > len(units):
        yield from [Share(around, 1, False)] * ranks
        return
    start = 0
    for count in _equal_parts(len(units), ranks):
        alone = bind == "cores" and count > 1
        bound = _threads(units[start : start + count]) if alone else around
        yield Share(bound, count, True)
        start += count


def _equal_parts(size: int, parts: int) -> list[int]:
    """Returns the sizes of nearly equal parts, larger ones first: 7 in 3 parts is [3, 2, 2]."""
    return [size // parts + (part < size % parts) for part in range(parts)]


def share_beside(alike: int, cores: Sequence[Core]) -> Share:
    """Returns the share of a rank that a launcher started, with these cores. `alike` is the number
    of ranks of the host, including this one, that may use exactly the same cores."""
    hardware_threads = sum(len(core.threads) for core in cores)
    return Share((), max(1, len(cores) // alike), alike <= hardware_threads)


def _threads(cores: Iterable[Core]) -> tuple[int, ...]:
    """The hardware threads of these cores, ascending."""
    return tuple(sorted(thread for core in cores for thread in core.threads))


def own_cores(system: Path = SYSTEM, own: Iterable[int] | None = None) -> list[Core]:
    """Returns the cores of the hardware threads `own` (None: the threads that Linux allows this
    process). A thread that Linux does not describe counts as a core of its own, in node 0. `system`
    is the folder in which Linux describes the machine."""
    left = set(_allowed() if own is None else own)
    nodes = {
        thread: int(match[1])
        for folder in system.glob("node/node*")
        if (match := re.fullmatch(r"node(\d+)", folder.name))
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
    """The hardware threads that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _numbers(file: Path) -> set[int]:
    """Returns the numbers in a file with a list of Linux, such as `0-3,8`; empty if there is no
    file."""
    try:
        text = file.read_text().strip()
    except OSError:
        return set()
    ends = (part.partition("-") for part in text.split(",") if part)
    return {n for first, _, last in ends for n in range(int(first), int(last or first) + 1)}
