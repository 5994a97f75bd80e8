"""The ranks of a world on several hosts, each a process that runs a module of the tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hosts.hosts import Host

_TESTS = Path(__file__).parent.parent
_PORT = 29400


def start(
    module: str,
    hosts: Sequence[Host],
    counts: Sequence[int],
    addresses: Sequence[str],
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[str]]:
    """Starts counts[i] ranks on host i, which listen at addresses[i]. Each runs `module` with its
    rank, the number of ranks, the store, its address, and these arguments."""
    places = [i for i, count in enumerate(counts) for _ in range(count)]
    store = f"tcp://{addresses[0]}:{_PORT}"
    settings = {
        "PYTHONPATH": f"{_TESTS}:{_TESTS.parent}",
        "ONNXPAR_KEY": "a key that no one else has",
        "ONNXPAR_INSECURE": "1",
        **(environment or {}),
    }
    return [
        hosts[i].start(
            [
                *(sys.executable, "-m", module, str(rank), str(len(places)), store),
                *(addresses[i], *arguments),
            ],
            settings,
        )
        for rank, i in enumerate(places)
    ]


def finish(ranks: Sequence[subprocess.Popen[str]], timeout: float = 240) -> list[str]:
    """What each rank prints. Errors: AssertionError with what a rank that fails says."""
    said = [rank.communicate(timeout=timeout) for rank in ranks]
    for rank, (_, errors) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, errors
    return [output for output, _ in said]
