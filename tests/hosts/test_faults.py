"""Hosts and links that fail while ranks run: an error that names the other end, and no hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hosts.conftest import Cluster

LOOP = """
import numpy as np, sys
import onnxpar.hvd as hvd
hvd.init()
print("up", flush=True)
while True:
    total = hvd.allreduce(np.ones(int(sys.argv[1]), np.float32), op=hvd.Sum)
    assert (np.asarray(total) == hvd.size()).all()
"""
"""Sums that go on until something fails, or a sum is wrong."""


@contextmanager
def sums(cluster: Cluster, hosts: str, length: int = 1000) -> Iterator[subprocess.Popen[str]]:
    count = sum(int(each.split(":")[1]) for each in hosts.split(","))
    command = [sys.executable, "-c", LOOP, str(length)]
    process = cluster.hosts[0].start(
        ["onnxpar", "launch", "--hosts", hosts, "--insecure", "--", *command],
        {**cluster.environment, "ONNXPAR_TIMEOUT": "5"},
        cluster.folder,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(count)] == ["up\n"] * count
        time.sleep(0.3)
        yield process
    finally:
        process.kill()
        process.wait()


def ends(process: subprocess.Popen[str]) -> str:
    """What a launch says that must end with an error."""
    _, errors = process.communicate(timeout=90)
    assert process.returncode not in (0, None)
    assert "AssertionError" not in errors, errors  # a wrong sum
    return errors


@pytest.mark.parametrize("length", [1000, 3_000_000])
def test_a_link_that_is_cut(cluster: Cluster, length: int) -> None:
    with sums(cluster, "a:1,b:1", length) as process:
        cluster.hosts[1].cut()
        try:
            errors = ends(process)
        finally:
            cluster.hosts[1].mend()
    assert "rank 1" in errors


@pytest.mark.parametrize("length", [1000, 3_000_000])
def test_a_link_that_is_cut_for_a_moment(cluster: Cluster, length: int) -> None:
    """Within the timeout, TCP sends again what was lost."""
    with sums(cluster, "a:1,b:1", length) as process:
        for _ in range(3):
            cluster.hosts[1].cut()
            time.sleep(0.5)
            cluster.hosts[1].mend()
            time.sleep(1)
        assert process.poll() is None


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_killed(cluster: Cluster, rank: int) -> None:
    with sums(cluster, "a:1,b:1,c:1") as process:
        host = cluster.hosts[rank]
        inside = host.run(["sh", "-c", "pgrep -f '[h]vd.init' | xargs -n1"]).split()
        own = [pid for pid in inside if _is_on(host.pid, pid)]
        host.run(["kill", "-9", own[-1]])
        errors = ends(process)
    assert f"rank {rank}" in errors
    assert "died" in errors or "signal 9" in errors


def test_a_host_that_is_gone(cluster: Cluster) -> None:
    """The last test: the host does not come back."""
    with sums(cluster, "a:1,b:1,c:1") as process:
        cluster.hosts[2].end()
        errors = ends(process)
    assert "host c, with rank 2, is lost: " in errors


def _is_on(host: int, pid: str) -> bool:
    return os.readlink(f"/proc/{host}/ns/net") == os.readlink(f"/proc/{pid}/ns/net")
