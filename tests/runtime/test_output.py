"""What ranks print."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRINTS = """
import os, sys, time
line = f"rank {os.environ['ONNXPAR_RANK']} says \\u00e9\\n".encode()
for i in range(200):
    for part in (line[:3], line[3:13], line[13:]):
        os.write(1, part)
        time.sleep(0.0005)
os.write(1, b"and no more")
"""


@pytest.mark.slow
def test_lines_of_ranks_do_not_mix() -> None:
    """Though each is written in parts, and one in the middle of a letter."""
    command = ["launch", "--hosts", "localhost:3", "--", sys.executable, "-c", PRINTS]
    ended = subprocess.run(
        [sys.executable, "-m", "onnxpar", *command], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    *lines, last = ended.stdout.rsplit("and no more", 3)
    found = "".join([*lines, last]).splitlines()
    assert sorted(found) == sorted(f"rank {rank} says é" for rank in range(3) for _ in range(200))


def test_a_line_without_an_end_does_not_grow() -> None:
    """It is passed on in parts, all of which arrive."""
    command = [sys.executable, "-c", "print('x' * 300_000, end='')"]
    ended = subprocess.run(
        [sys.executable, "-m", "onnxpar", "launch", "--hosts", "localhost:1", "--", *command],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "x" * 300_000)
