"""Temporary folders that belong to one process. They are removed when the process ends; if it was
killed, the next process that creates one at the same place removes what was left."""

from __future__ import annotations

import atexit
import fcntl
import functools
import glob
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

SUFFIX = ".onnxpar"
_OWNER = re.compile(r"([0-9a-f]{8})-(\d+)-(\d+)\.[0-9a-f]{8}" + re.escape(SUFFIX))
"""The end of an `own_name`: machine, process number, start time of the process, and random
digits."""
_GONE = ("Z", "X")
"""States of a process that has ended, but whose parent has not waited for it."""
_YOUNG = 60.0
"""Age in seconds up to which an unlocked folder of another machine is kept: its process may be
about to lock it."""
_made: dict[Path, int] = {}
"""Folders that are not removed yet, with the number of the process that made them."""


class OwnFolder:
    """A new folder in `parent` (default: the system's folder for temporary files), readable by this
    user alone, whose name begins with `prefix`. `close`, the end of a `with` block and the end of
    the process remove it, unless it has been renamed. Errors: OSError."""

    PREFIX = "onnxpar-"

    def __init__(self, prefix: str = PREFIX, parent: Path | None = None) -> None:
        place = Path(tempfile.gettempdir() if parent is None else parent).absolute()
        remove_left(place, prefix)
        self.path = place / own_name(prefix)
        # _made gets the path before the folder exists: a signal may end the process in between.
        _made[self.path] = os.getpid()
        try:
            self.path.mkdir(mode=0o700)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            del _made[self.path]
            raise
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the folder with its content; a second call does nothing."""
        if _made.get(self.path) == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
            _made.pop(self.path, None)
            os.close(self._lock)


@atexit.register
def remove_all() -> None:
    """Removes all folders that this process has made and not removed yet."""
    for path, owner in list(_made.items()):
        if owner == os.getpid():
            shutil.rmtree(path, ignore_errors=True)
            _made.pop(path, None)


def remove_left(parent: Path, prefix: str) -> None:
    """Removes folders and files in `parent` that have an `own_name` with this prefix and whose
    processes have ended."""
    for name in glob.glob(f"{glob.escape(prefix)}*{SUFFIX}", root_dir=parent):
        left = parent / name
        if _is_left(left, prefix):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def own_name(prefix: str) -> str:
    """Returns a new, unique name that begins with `prefix` and says which process made it."""
    process = os.getpid()
    return f"{prefix}{_machine()}-{process}-{_start(process)}.{secrets.token_hex(4)}{SUFFIX}"


def _is_left(path: Path, prefix: str) -> bool:
    """True if the file or folder belongs to this user and the process that made it has ended. On
    this machine, number and start time identify the process; a process on another machine is alive
    while it holds a lock on its folder."""
    owner = _OWNER.fullmatch(path.name[len(prefix) :])
    if owner is None:
        return False
    try:
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        status = os.fstat(lock)
        if status.st_uid != os.geteuid():
            return False
        if owner[1] == _machine():
            return _start(int(owner[2])) != int(owner[3])
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - status.st_mtime > _YOUNG
    except OSError:
        return False
    finally:
        os.close(lock)


@functools.cache
def _machine() -> str:
    """Returns an identifier of this boot of the machine and of the namespace of process numbers,
    within which process numbers are unique. Where the system gives no such identifiers, random
    digits of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        text = boot + os.readlink("/proc/self/ns/pid")
    except OSError:
        text = secrets.token_hex()
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _start(process: int) -> int:
    """Start time of a process in ticks since the boot; 0 if it has ended, or is unknown."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in _GONE else int(fields[19])
