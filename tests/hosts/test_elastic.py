"""Training that goes on while hosts are lost and return."""

from __future__ import annotations

import subprocess
import time

import pytest
from hosts.conftest import Cluster
from hosts.test_start import LAUNCH
from hosts.test_training import TRAIN, losses, step

__all__ = ["step"]
MINE = ["--insecure", "--min-ranks", "2", "--"]
PER_EPOCH = 8


class Training:
    """A launch of an elastic run in the shared folder, which would take days."""

    def __init__(self, cluster: Cluster, name: str, hosts: str) -> None:
        train = ["train", "step.par", *TRAIN, "100000", "--checkpoint", name, "--every", "4"]
        train += ["--log-dir", f"{name}.log", "--elastic", "--timeout", "20"]
        self.cluster, self.log = cluster, cluster.folder / f"{name}.log"
        self.process = cluster.hosts[0].start(
            [*LAUNCH, "--hosts", hosts, *MINE, *train],
            cluster.environment,
            cluster.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def taken(self, generation: int) -> int:
        """How many steps a generation has taken."""
        folder = self.log / f"generation.{generation}" if generation else self.log
        log = folder / "rank.0" / "stdout.log"
        return log.read_text().count("(step ") if log.exists() else 0

    def wait(self, generation: int, steps: int = 10, seconds: float = 120) -> None:
        """Waits until a generation has taken so many steps."""
        end = time.monotonic() + seconds
        while self.taken(generation) < steps:
            if time.monotonic() > end or self.process.poll() is not None:
                raise AssertionError(
                    self.end(), [(str(p), p.read_text()) for p in self.log.rglob("*.log")]
                )
            time.sleep(0.1)

    def end(self) -> list[str]:
        """Asks the run to end; returns what it has said."""
        self.process.terminate()
        try:
            _, errors = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return errors.splitlines()

    def check(self) -> None:
        """Each step is there once, with the loss that a run on one host has."""
        found = losses(self.log)
        assert list(found) == list(range(1, len(found) + 1))
        command = ["onnxpar", "train", "step.par", *TRAIN, str(len(found) // PER_EPOCH + 1)]
        self.cluster.hosts[0].run(
            [*command, "--log-dir", "one.log"], self.cluster.environment, self.cluster.folder, 300
        )
        wanted = losses(self.cluster.folder / "one.log")
        for each, loss in found.items():
            assert loss == pytest.approx(wanted[each], rel=1e-4), each


def test_a_host_is_cut_off_and_returns(cluster: Cluster, step: None) -> None:
    """That of rank 0."""
    training = Training(cluster, "cut", "c:1,a:2,b:1")
    training.wait(0)
    cluster.hosts[2].cut()
    try:
        training.wait(1)
    finally:
        cluster.hosts[2].mend()
    training.wait(2)
    said = training.end()
    told = [line for line in said if " lost" in line or "joins" in line]
    assert told[0].startswith("onnxpar: host c, with rank 0, is lost: "), said
    assert told[1:] == [
        "onnxpar: generation 0 has ended: c is lost; 3 slots go on",
        "onnxpar: generation 1 has ended: c:0 joins; 4 slots go on",
    ], said
    training.check()
