"""What a reshard costs: latency plus bytes, per kind of collective.

Seconds on one host with Gloo; only their order matters to the choices that are made with them.
"""

from __future__ import annotations

LATENCY = 50e-6
"""Seconds before the first byte of a collective moves."""
BANDWIDTH = 2e9
"""Bytes per second that a rank sends."""
MEMORY_BANDWIDTH = 1e10
"""Bytes per second that a rank copies."""

FLOPS = 2e10
"""Multiplications and additions per second of a rank."""

_TRAFFIC = {
    "AllReduce": 2.0,
    "ReduceScatter": 1.0,
    "AllGather": 1.0,
    "AllToAll": 1.0,
    "Broadcast": 1.0,
}


def bytes_sent(kind: str, ranks: int, size: float) -> float:
    """Bytes that each rank sends, of a tensor that takes `size` bytes where it is largest.

    Ring algorithms: an all-reduce sends everything but its own part, twice.
    """
    return _TRAFFIC.get(kind, 0.0) * size * (ranks - 1) / ranks


def step_seconds(kind: str, ranks: int, size: float) -> float:
    """Seconds for one step over `ranks` ranks; a local cut or select costs a copy."""
    if kind in _TRAFFIC:
        return LATENCY + bytes_sent(kind, ranks, size) / BANDWIDTH
    return size / MEMORY_BANDWIDTH
