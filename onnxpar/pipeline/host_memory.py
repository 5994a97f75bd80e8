"""What the ranks of this host hold together, and how much memory the host has."""

from __future__ import annotations

from pathlib import Path

from onnxpar.compiler.plan import Plan

SHARE = 0.9
"""Of the host's memory that ranks may take; the rest is the system's."""
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_bytes() -> int | None:
    """The memory of this host, or of the container that this process runs in, in bytes; None where
    neither can be read."""
    found = []
    for line in _text(_MEMINFO).splitlines():
        if line.startswith("MemTotal:"):
            found.append(int(line.split()[1]) * 1024)
    limits = [_text(path).strip() for path in _CGROUPS]
    found += [int(limit) for limit in limits if limit.isdigit()]
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def held_together(plan: Plan) -> int:
    """What all ranks of a plan hold, in bytes. A table that is only looked up, and whole on every
    rank, is mapped from one file: it counts once. onnxruntime copies weights of products into a
    layout of its own, so that each rank has its own copy of them."""
    ranks = plan.mesh.size
    tables = {lookup.table for lookup in plan.lookups}
    shared = sum(w.bytes for w in plan.weights if w.name in tables and w.bytes_per_rank == w.bytes)
    return ranks * sum(plan.memory.values()) - (ranks - 1) * shared
