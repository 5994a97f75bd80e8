"""Ranks of each kind send their messages by what the fixture `medium` names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runtime.bundles import pids

from onnxpar import hvd
from onnxpar.hvd.communicator import current
from onnxpar.runtime.session.session import InferenceSession

SCRIPT = """
from onnxpar import hvd
from onnxpar.hvd.communicator import current
hvd.init(timeout=30)
print(current().world.shares_memory_with(1 - hvd.rank()))
hvd.shutdown()
"""


def shares_memory(pid: int) -> bool:
    """True if a process has memory of its own in which it leaves messages."""
    folder = Path(f"/proc/{pid}/fd")
    return "/memfd:onnxpar (deleted)" in [os.readlink(fd) for fd in folder.iterdir()]


def of_threads(par: Path, folder: Path) -> list[bool]:
    return hvd.run_on_threads(lambda: current().world.shares_memory_with(1 - hvd.rank()), 2)


def of_a_session(par: Path, folder: Path) -> list[bool]:
    with InferenceSession(par) as session:
        return [shares_memory(pid) for pid in pids(session)]


def of_a_launcher(par: Path, folder: Path) -> list[bool]:
    common = {"ONNXPAR_WORLD_SIZE": "2", "ONNXPAR_STORE": f"file:{folder}/store"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **common, "ONNXPAR_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    return [{"True\n": True, "False\n": False}[text] for text in said]


@pytest.mark.matrix
@pytest.mark.parametrize("shared", [of_threads, of_a_session, of_a_launcher])
def test_the_medium_is_the_one_that_is_named(
    shared: Callable[[Path, Path], list[bool]], medium: str, par: Path, tmp_path: Path
) -> None:
    assert shared(par, tmp_path) == [medium == "shared-memory"] * 2
