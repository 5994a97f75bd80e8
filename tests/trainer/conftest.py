"""What tests of training commands share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer.disk import DISK, Disk

from onnxpar.base import new_folder
from onnxpar.base.digests import DigestWriter


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that do not outlive a test."""
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture(scope="session", autouse=True)
def heard() -> None:
    sys.addaudithook(DISK.hear)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """All file operations; those that Python does not tell of are patched."""
    exchange, write = new_folder._exchange, DigestWriter.write

    def synced(descriptor: int) -> None:
        DISK.operation("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))

    def exchanged(one: Path, two: Path) -> bool:
        DISK.operation("exchange", os.fspath(one), os.fspath(two))
        return exchange(one, two)

    def written(self: DigestWriter, data: bytes | memoryview) -> None:
        DISK.operation("write", self._sink.name)
        write(self, memoryview(data)[: len(data) // 2])
        DISK.operation("write", self._sink.name)
        write(self, memoryview(data)[len(data) // 2 :])

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(new_folder, "_exchange", exchanged)
    monkeypatch.setattr(DigestWriter, "write", written)
    yield DISK
    DISK.stop()
