"""Topologies of machines by short names, such as `8x64-core,25GbE` (8 hosts of 64 cores), for plans
without a topology file.

The figures are round numbers for current servers; docs/how-to/topology.md names the sources, and
says which figures are assumed.
"""

from __future__ import annotations

import os
import re
from typing import Any

from onnxpar.base.errors import StrategyError

_NAME = re.compile(r"(?:(\d+)x)?(\d+)-?cores?(?:,(.*))?")
_NETWORKS = {f"{gbits}GbE": gbits * 1e9 / 8 for gbits in (1, 10, 25, 50, 100, 200)}
"""Bytes per second of a host's network interface, by its name."""
_TCP = {"latency": 50e-6, "share": 0.9}
"""Seconds of a round of messages over TCP, and the fraction of a network's bandwidth that payload
gets."""
_HOST = {"latency": 4e-6, "bandwidth": 7.2e9}
"""The link between ranks of a host: shared memory, at the speed at which each rank can read it."""
_CORE = {"flops": 100e9, "memory_bandwidth": 7.2e9, "cache": 4e6, "cache_bandwidth": 60e9}
"""The speed of a core while all cores of its host work, with its part of shared caches and
memory."""
_OP = {"exposed": 1, "launch": 1e-6, "row": 2.5e-9}
_TOGETHER = 0.8
"""A single rank with a thread on each core gets this fraction of the FLOP/s of all cores."""
_MEMORY = 4e9
"""Bytes of memory for each core."""
_SESSION = {"latency": 2e-6, "rank": 7e-6, "bandwidth": 30e9}
_MOST = 1 << 16


def is_machine(name: str | os.PathLike[str]) -> bool:
    """True if a name has the form HOSTSxCORES-core,NETWORK or CORES-core (one host), and no file
    has this name."""
    return bool(_parsed(os.fspath(name))) and not os.path.exists(name)


def _parsed(name: str) -> re.Match[str] | None:
    return _NAME.fullmatch(name.replace(" ", ""))


def machine(name: str, ranks: int | None) -> dict[str, Any]:
    """Returns the topology of these machines, as the content of a topology file. `ranks` is the
    number of ranks to place; None: one for each core. Errors: StrategyError for a network that is
    unknown or missing."""
    match = _parsed(name)
    assert match is not None
    hosts, cores, network = int(match[1] or 1), int(match[2]), match[3] or ""
    if not 1 <= hosts <= _MOST or not 1 <= cores <= _MOST:
        raise StrategyError(f"--topology {name}: give numbers from 1 to {_MOST:,}")
    here = cores if ranks is None else -(-ranks // hosts)
    levels: list[dict[str, Any]] = [{"name": "host", "size": here, "at_once": cores, **_HOST}]
    if hosts > 1:
        if network not in _NETWORKS:
            raise StrategyError(
                f"--topology {name}: give the network between the hosts, such as "
                f"{hosts}x{cores}-core,25GbE; it is one of {', '.join(_NETWORKS)}"
            )
        bandwidth = _NETWORKS[network] * _TCP["share"] / here
        link = {"latency": _TCP["latency"], "bandwidth": bandwidth}
        levels.append({"name": "network", "size": hosts, **link})
    device = {**_CORE, **_OP, "memory": _MEMORY * cores / here}
    whole = {key: value * cores for key, value in _CORE.items()}
    alone = {**device, **whole, "flops": _CORE["flops"] * max(_TOGETHER * cores, 1)}
    return {"levels": levels, "device": device, "alone": alone, "session": _SESSION}
