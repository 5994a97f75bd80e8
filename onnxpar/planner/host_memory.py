"""The memory of this host, and what all ranks of a plan together need of it."""

from __future__ import annotations

from pathlib import Path

from onnxpar.compiler.plan import Plan

SHARE = 0.9
"""Ranks may take this fraction of the host's memory; the system needs the rest."""
PROCESS = 30 << 20
"""Bytes that the process of a rank needs beyond the tensors that a plan counts; measured."""
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_bytes() -> int | None:
    """Returns the bytes of memory of this host, or of this process's container if that has less;
    None if unknown."""
    sizes = []
    for line in _text(_MEMINFO).splitlines():
        if line.startswith("MemTotal:"):
            sizes.append(int(line.split()[1]) * 1024)
    limits = [_text(path).strip() for path in _CGROUPS]
    sizes += [int(limit) for limit in limits if limit.isdigit()]
    return min(sizes, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def bytes_of_all_ranks(plan: Plan) -> int:
    """Returns the bytes that all ranks of a plan hold together.

    A whole table that nodes only look up counts once, as all ranks map it from one file. Other
    weights count for each rank: onnxruntime repacks the weights of matrix products into memory of
    its own.
    """
    ranks = plan.mesh.size
    tables = {lookup.table for lookup in plan.lookups} - {""}
    shared = sum(w.bytes for w in plan.weights if w.name in tables and w.bytes_per_rank == w.bytes)
    return ranks * sum(plan.memory.values()) - (ranks - 1) * shared
