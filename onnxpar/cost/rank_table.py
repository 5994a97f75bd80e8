"""Reads rank tables of MindSpore and HCCL, which list the server of each rank.

Formats: hiascend.com, "HCCL: ranktable"; `server_list` is its template 1 (version 1.0 and later),
`group_list` its template 2, in which instances may have a rank (MindSpore).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from onnxpar.base.errors import StrategyError


def is_rank_table(data: Any) -> bool:
    """True if the content of a file is a rank table and not a topology."""
    return isinstance(data, Mapping) and ("server_list" in data or "group_list" in data)


def hosts_of(data: Mapping[str, Any], source: str) -> tuple[int, int]:
    """Returns (number of servers, ranks on each) of a rank table. `source` names it in errors.
    Errors: StrategyError if servers have different numbers of ranks, or if ranks are not numbered
    server by server."""
    ranks = list(_ranks(data, source))
    if sorted(rank for rank, _ in ranks) != list(range(len(ranks))) or not ranks:
        numbers = sorted(rank for rank, _ in ranks)
        raise StrategyError(
            f"{source}: the rank_ids are {numbers}; use each number from 0 to N-1 once"
        )
    servers: dict[str, list[int]] = defaultdict(list)
    for rank, server in sorted(ranks):
        servers[server].append(rank)
    sizes = {name: len(of) for name, of in servers.items()}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise StrategyError(
            f"{source}: servers have different numbers of ranks ({counts}); use the same number on "
            "each"
        )
    for name, of in servers.items():
        if of[-1] - of[0] != len(of) - 1:
            raise StrategyError(
                f"{source}: server {name} has the ranks {of}; give each server consecutive ranks"
            )
    return len(servers), len(ranks) // len(servers)


def _ranks(data: Mapping[str, Any], source: str) -> Iterator[tuple[int, str]]:
    """Yields (rank, server) for every device. A device without a rank gets its position in the
    table as rank."""
    number = count()
    try:
        for server in data.get("server_list", ()):
            for device in server["device"]:
                yield int(device["rank_id"]), str(server["server_id"])
        for group in data.get("group_list", ()):
            for instance in group["instance_list"]:
                for _ in instance["devices"]:
                    yield int(instance.get("rank_id", next(number))), str(instance["server_id"])
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise StrategyError(
            f"{source}: the rank table is incomplete or has a wrong value ({error!r})"
        ) from None
