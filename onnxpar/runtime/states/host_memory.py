"""How much memory hosts have for their ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onnxpar.runtime.profile.profile import host_id


@dataclass(frozen=True)
class HostMemory:
    """The memory of a host on which `ranks` ranks run: free and total bytes."""

    host: str
    ranks: int
    free: int
    total: int

    @staticmethod
    def here(ranks: int) -> HostMemory:
        """Returns the memory of this host, for `ranks` ranks on it."""
        free, total = (
            os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
            for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
        )
        return HostMemory(socket.gethostname(), ranks, free, total)


def told_memory() -> dict[str, Any]:
    """Returns a rank's message to others about the memory of its host, as data for JSON."""
    return {"id": host_id(), **asdict(HostMemory.here(1))}


def memory_of_hosts(told: Sequence[Mapping[str, Any]]) -> list[HostMemory]:
    """Returns the memory of each host, from the messages of all ranks."""
    of_hosts: dict[str, list[Mapping[str, Any]]] = {}
    for each in told:
        of_hosts.setdefault(each["id"], []).append(each)
    return [
        HostMemory(
            beside[0]["host"],
            len(beside),
            min(each["free"] for each in beside),
            min(each["total"] for each in beside),
        )
        for beside in of_hosts.values()
    ]
