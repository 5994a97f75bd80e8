"""A lock on a folder: one process at a time writes there, and a process that ends frees it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from onnxpar.errors import InputError
from onnxpar.files.write_file import make_folders, unread, writing

NAME = ".onnxpar.lock"
"""The file that is locked; it says which process holds it, and is gone when that ends well."""
_HOLDER = re.compile(rb"process (\d+) on ([\w.-]+)\n")
_HELD = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""Of file systems that cannot lock a file."""
_PATIENCE, _TICK = 2.0, 0.05
"""Seconds in which a process that has just locked a file says which one it is, and between looks
at it."""
_inherited: set[int] = set()
"""Descriptors that a fork of this process must close, else the fork would hold the locks."""


class FolderLock:
    """Holds the lock of a folder, which it makes where it is not there, until `release`, the end of
    a `with`, or the end of the process, however that ends.

    Errors: InputError where another process holds it, which it names; OnnxparError where the
    folder cannot be written to. Where the file system cannot lock files, a warning on stderr says
    so, and nothing is locked.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with writing(folder):
            made = make_folders(folder)
            try:
                descriptor = _locked(folder)
            except BaseException:
                _remove_empty(made)
                raise
        _inherited.add(descriptor)
        end = weakref.finalize(self, _release, os.getpid(), descriptor, folder / NAME, made)
        self._finalizer = end

    def is_of(self, folder: Path) -> bool:
        """Tells whether it holds this folder."""
        return self._finalizer.alive and folder.exists() and folder.samefile(self.folder)

    def release(self) -> None:
        """Frees the folder. A second time, it does nothing."""
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


def _locked(folder: Path) -> int:
    """Locks a folder's file, writes into it who this process is, and returns its descriptor.
    Errors: InputError where another process holds it; OSError."""
    file = folder / NAME
    deadline = time.monotonic() + _PATIENCE
    holder: re.Match[bytes] | None = None
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        is_ours = False
        try:
            is_free = _lock(descriptor, file)
            if is_free and _stands_at(descriptor, file):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _own_name(), 0)
                is_ours = True
                return descriptor
            if not is_free and (holder or time.monotonic() > deadline):
                raise InputError(
                    f"{folder} is in use: {_told(holder)} holds {NAME} there; wait until it ends, "
                    "or choose another folder"
                )
            time.sleep(_TICK)  # one that has just taken the lock may not have said so yet
            holder = _HOLDER.fullmatch(os.pread(descriptor, 1000, 0))
        finally:
            if not is_ours:
                os.close(descriptor)


def _own_name() -> bytes:
    return f"process {os.getpid()} on {socket.gethostname()}\n".encode()


def _told(holder: re.Match[bytes] | None) -> str:
    if holder is None:
        return "another process"
    return f"process {holder[1].decode()} on host {holder[2].decode()}"


def _lock(descriptor: int, file: Path) -> bool:
    """Takes the lock; False where another process holds it. A file system without locks gets a
    warning."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _NO_LOCKS:
            raise
        print(
            f"onnxpar: warning: cannot lock {file}: {unread(error)}; see to it that no other "
            "process writes to that folder",
            file=sys.stderr,
        )
    return True


def _stands_at(descriptor: int, file: Path) -> bool:
    """Tells whether the file is still there: a process that ends removes its own."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _release(owner: int, descriptor: int, file: Path, made: Sequence[Path]) -> None:
    """Removes the file and frees it, and removes folders that were made for nothing."""
    if os.getpid() != owner:
        return
    with suppress(OSError):
        if _stands_at(descriptor, file):
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
    """In a fork: the lock stays with the process that took it."""
    for descriptor in _inherited:
        with suppress(OSError):
            os.close(descriptor)
    _inherited.clear()


os.register_at_fork(after_in_child=_forget)
