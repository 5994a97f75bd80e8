"""How ranks and their hosts end, whatever they have started or print."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from runtime.bundles import is_alive, wait_until

from onnxpar.runtime.launch.launcher import Command, Launcher

LEAVES = "sleep 600 & echo $! > {pid}; {end}"
"""A program that ends while one that it has started holds its output open."""


def launch(
    *words: str, options: Sequence[str] = (), **more: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "onnxpar", "launch", *options, "--", *words],
        capture_output=True,
        timeout=60,
        env={**os.environ, **more},
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("end", "status", "how"),
    [
        ("echo done", 0, ""),
        ("exit 3", 3, "onnxpar: rank 0 on host localhost ended first, with status 3\n"),
        (
            "kill -KILL $$",
            137,
            "onnxpar: rank 0 on host localhost ended first, by signal 9\n",
        ),
    ],
)
@pytest.mark.parametrize("options", [[], ["--min-ranks", "1", "--max-restarts", "0"]])
def test_what_a_rank_leaves_behind_ends(
    end: str, status: int, how: str, options: Sequence[str], tmp_path: Path
) -> None:
    """With its rank, which would seem to run on as long as its output is open."""
    program = LEAVES.format(pid=tmp_path / "pid", end=end)
    ended = launch("sh", "-c", program, options=["--hosts", "localhost:1", *options])
    if options and status > 128:
        assert ended.returncode == 2 and b"ranks left: 0, fewer than" in ended.stderr
    else:
        assert ended.returncode == status, ended.stderr
        assert options or ended.stderr.decode() == how
    assert ended.stdout == (b"done\n" if status == 0 else b"")
    assert wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


@pytest.mark.slow
def test_a_program_that_ends_like_ssh_does_not_lose_its_host() -> None:
    options = ["--hosts", "localhost:2", "--min-ranks", "1"]
    ended = launch("sh", "-c", "[ $ONNXPAR_RANK = 0 ] && exit 255; sleep 600", options=options)
    assert ended.returncode == 255 and b"lost" not in ended.stderr


@pytest.mark.slow
def test_who_is_waited_for_is_told() -> None:
    """Whom a signal does not end."""
    options = ["--hosts", "localhost:2", "--grace", "3"]
    program = "[ $ONNXPAR_RANK = 0 ] && exit 3; trap '' TERM; while :; do sleep 1; done"
    ended = launch("sh", "-c", program, options=options)
    assert ended.returncode == 3
    line = b"onnxpar: waiting up to 3 s (--grace) for rank 1 on host localhost to end\n"
    assert ended.stderr.startswith(line)


def python_that(folder: Path, does: str) -> str:
    """A Python that does something first."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_what_a_login_script_prints(tmp_path: Path) -> None:
    """Is not of onnxpar, though it may be JSON."""
    python = python_that(tmp_path, f'echo 5; echo "[]"; echo hello; exec {sys.executable} "$@"')
    options = ["--hosts", "localhost:1", "--python", python]
    ended = launch("echo", "é", options=options, PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "é\n".encode(), b"")


def test_an_agent_that_says_more_while_all_ends(tmp_path: Path) -> None:
    """It ends all the same, and so do the others."""
    says = 'while read -r line; do :; done; echo "{\\"hub\\": \\"x\\"}"'
    python = python_that(tmp_path, says)
    command = Command(["true"], str(tmp_path), {}, python, grace=1.0)
    with Launcher({"localhost": [0], "127.0.0.1": [1]}, command) as launched:
        agents = [agent.process for agent in launched._agents]
    assert [process.returncode for process in agents] == [0, 0]
