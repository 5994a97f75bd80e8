"""Division of a host's cores among its ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from onnxpar.layout.layout import nested_parts


@dataclass(frozen=True)
class Share:
    """The cores that a rank is bound to (empty: not bound), its number of threads, and whether
    these threads may spin."""

    cores: tuple[int, ...]
    threads: int
    spin: bool


def shares(ranks: int, cores: Sequence[int] | None = None) -> list[Share]:
    """Returns each rank's share of `cores`, by default of the cores that this process may use.

    With more ranks than cores, each rank has one thread, which never spins: a spinning thread would
    take the core from the rank that it waits for. A rank with one core is not bound to it, because
    the rank communicates in a second thread (measured on 2 cores: a small run takes 4 times as long
    if bound).
    """
    cores = own_cores() if cores is None else cores
    if ranks > len(cores):
        return [Share((), 1, False)] * ranks
    out, start = [], 0
    for count in nested_parts(len(cores), (ranks,)):
        bound = tuple(cores[start : start + count]) if count > 1 else ()
        out.append(Share(bound, count, True))
        start += count
    return out


def own_cores() -> list[int]:
    """Returns the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
