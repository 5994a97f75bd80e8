"""A lock on a folder, so that only one process writes there. The end of the process releases the
lock."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from onnxpar.base.errors import InputError
from onnxpar.base.log import LOG
from onnxpar.base.write_file import make_folders, unread, writing

NAME = ".onnxpar.lock"
"""Name of the locked file in the folder. It contains the number and host of the process that holds
the lock (`process 4711 on host1`); that process removes the file at its end."""
_HOLDER = re.compile(rb"process (\d+) on ([\w.-]+)\n")
_HELD = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""Errors of file systems that cannot lock files."""
_PATIENCE, _TICK = 2.0, 0.05
"""In seconds: how long to wait until a process that has just locked the file has written its name
into it; and the pause between two attempts to read that name."""
_inherited: set[int] = set()
"""Descriptors of locked files; a forked child must close them, else it would hold the locks too."""


class FolderLock:
    """Holds the lock of a folder until `release`, the end of a `with` block, or any end of the
    process. Creates the folder if it does not exist. If the file system cannot lock files, prints a
    warning on stderr and locks nothing.

    patience  seconds to wait for another process that holds the lock; a file system that hosts
              share may take a while to notice that a process is gone

    Errors: InputError that names the other process, if it still holds the lock; OnnxparError if the
    folder cannot be written to.
    """

    def __init__(self, folder: Path, patience: float = 0.0) -> None:
        self.folder = folder
        with writing(folder):
            made = make_folders(folder)
            try:
                descriptor = _locked(folder, patience)
            except BaseException:
                _remove_empty(made)
                raise
        _inherited.add(descriptor)
        end = weakref.finalize(self, _release, os.getpid(), descriptor, folder / NAME, made)
        self._finalizer = end

    def is_of(self, folder: Path) -> bool:
        """True if this object still holds its lock, and `folder` is the locked folder, maybe by
        another path."""
        return self._finalizer.alive and folder.exists() and folder.samefile(self.folder)

    def release(self) -> None:
        """Releases the lock; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _locked(folder: Path, patience: float) -> int:
    """Locks the lock file of a folder, writes the name of this process into it, and returns its
    descriptor. Errors: InputError if another process still holds the lock after `patience` seconds;
    OSError."""
    file = folder / NAME
    start = time.monotonic()
    holder: re.Match[bytes] | None = None
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        is_ours = False
        try:
            is_free = _lock(descriptor, file)
            if is_free and _is_still_at(descriptor, file):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _own_name(), 0)
                is_ours = True
                return descriptor
            waited = time.monotonic() - start
            is_known = holder is not None or waited > _PATIENCE
            if not is_free and is_known and waited >= patience:
                raise InputError(
                    f"{folder} is in use: {_text(holder)} has locked {NAME} there; wait until that "
                    "process ends, or choose another folder"
                )
            time.sleep(_TICK)  # the holder may not have written its name yet
            holder = _HOLDER.fullmatch(os.pread(descriptor, 1000, 0))
        finally:
            if not is_ours:
                os.close(descriptor)


def _own_name() -> bytes:
    return f"process {os.getpid()} on {socket.gethostname()}\n".encode()


def _text(holder: re.Match[bytes] | None) -> str:
    if holder is None:
        return "another process"
    return f"process {holder[1].decode()} on host {holder[2].decode()}"


def _lock(descriptor: int, file: Path) -> bool:
    """Locks an open file without waiting. Returns False if another process holds the lock; True
    also if the file system has no locks, after a warning."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _NO_LOCKS:
            raise
        LOG.warning(
            f"cannot lock {file}: {unread(error)}; make sure that no other process writes to that "
            "folder"
        )
    return True


def _is_still_at(descriptor: int, file: Path) -> bool:
    """True if `descriptor` is still the file at this path, not one that its former owner has
    removed since."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _release(owner: int, descriptor: int, file: Path, made: Sequence[Path]) -> None:
    """Removes and unlocks the lock file, and removes the folders in `made` (created with the lock)
    that are empty. Does nothing in a forked child of `owner`, the number of the process that took
    the lock."""
    if os.getpid() != owner:
        return
    with suppress(OSError):
        if _is_still_at(descriptor, file):
            file.unlink()
    _inherited.discard(descriptor)
    with suppress(OSError):
        os.close(descriptor)
    _remove_empty(made)


def _remove_empty(made: Sequence[Path]) -> None:
    with suppress(OSError):
        for folder in made:
            folder.rmdir()


def _forget() -> None:
    """Closes the descriptors of locked files in a forked child, so that each lock belongs only to
    the process that took it."""
    for descriptor in _inherited:
        with suppress(OSError):
            os.close(descriptor)
    _inherited.clear()


os.register_at_fork(after_in_child=_forget)
