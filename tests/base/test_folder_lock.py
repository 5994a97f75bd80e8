"""One process at a time holds a folder; whoever ends frees it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onnxpar.base import folder_lock
from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.base.folder_lock import NAME, FolderLock

HOLD = """
import os, sys, time
from pathlib import Path
from onnxpar.base.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
child = os.fork() if "fork" in sys.argv else 0
if not child and "fork" in sys.argv:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


def holder(folder: Path, *more: str) -> subprocess.Popen[str]:
    """A process that holds a folder, when it has told of the child that it may have forked."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *more], stdout=subprocess.PIPE, text=True
    )


def test_a_second_one_is_refused(tmp_path: Path) -> None:
    """By the name of the folder, of the process and of its host."""
    place = tmp_path / "a" / "b"
    with FolderLock(place) as lock:
        assert lock.is_of(place) and not lock.is_of(tmp_path)
        text = f"{place} is in use: process {os.getpid()} on host {socket.gethostname()}"
        with pytest.raises(InputError, match=text):
            FolderLock(place)
        (place / "precious").touch()
    assert [file.name for file in place.iterdir()] == ["precious"]
    FolderLock(place).release()
    assert [file.name for file in place.iterdir()] == ["precious"]


def test_patience_outlasts_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder ends while the second one waits; a third one does not wait so long."""
    first = FolderLock(tmp_path)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 5:
            first.release()

    monkeypatch.setattr(folder_lock.time, "sleep", sleep)
    with FolderLock(tmp_path, patience=60):
        assert len(looks) == 5
        with pytest.raises(InputError, match=f"process {os.getpid()} on"):
            FolderLock(tmp_path, patience=0.01)


def test_folders_made_for_nothing_are_removed(tmp_path: Path) -> None:
    FolderLock(tmp_path / "a" / "b").release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [(), ("fork",)])
def test_a_killed_process_frees_it(more: tuple[str, ...], tmp_path: Path) -> None:
    """Also where a fork of it lives on."""
    process = holder(tmp_path, *more)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    with pytest.raises(InputError, match=f"process {process.pid} on host"):
        FolderLock(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / NAME).exists()
    try:
        FolderLock(tmp_path).release()
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
    assert not (tmp_path / NAME).exists()


def test_it_goes_to_no_child(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        code = "import os; print(*(os.readlink(f'/proc/self/fd/{n}') for n in range(3, 99)"
        code += " if os.path.exists(f'/proc/self/fd/{n}')))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert NAME not in done.stdout and done.returncode == 0


@pytest.mark.slow
def test_what_the_file_says_is_not_believed(tmp_path: Path) -> None:
    """It was left behind, or is another's."""
    (tmp_path / NAME).write_text("process 1 on elsewhere\n")
    FolderLock(tmp_path).release()
    (tmp_path / NAME).write_bytes(b"\xff\x1b[2J" * 100)
    with (tmp_path / NAME).open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="in use: another process has locked"):
            FolderLock(tmp_path)
    (tmp_path / NAME).unlink()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / NAME).symlink_to("precious")
    with pytest.raises(OnnxparError, match=f"cannot write {tmp_path}: "):
        FolderLock(tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"


def test_one_that_ends_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is gone when the next one has locked it: that makes a new one."""
    first = FolderLock(tmp_path)
    real = os.open

    def opened(*given: Any) -> int:
        descriptor = real(*given)
        first.release()
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(folder_lock.os, "open", opened)
        second = FolderLock(tmp_path)
    with second, pytest.raises(InputError, match="in use: process"):
        FolderLock(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a network file system may be: a warning says so."""

    def refuse(*given: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(folder_lock.fcntl, "flock", refuse)
    with FolderLock(tmp_path):
        (said,) = caplog.messages
    assert said.startswith(f"cannot lock {tmp_path / NAME}: ")
    assert "no other process writes" in said


@pytest.mark.parametrize("kind", ["a file", "below a file", "a link to nothing", "no folder"])
def test_where_no_folder_can_be(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "further")
    place = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "c",
        "a link to nothing": tmp_path / "link",
        "no folder": Path("/proc/c"),
    }[kind]
    with pytest.raises(OnnxparError, match=f"cannot write {place}: .*; "):
        FolderLock(place)
    assert (tmp_path / "file").read_text() == "precious"
