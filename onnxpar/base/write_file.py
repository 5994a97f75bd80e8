"""Writes files that get their names only when they are complete; messages for files that cannot be
read or written."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.base.own_folder import OwnFolder

PREFIX = ".onnxpar-"
"""Prefix of folders in which files are written before they get their names."""

_REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "free some space there, or choose another place",
    errno.EDQUOT: "free some space there, or choose another place",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose another place",
    errno.EACCES: "give this user the permission, or choose another place",
    errno.EPERM: "give this user the permission, or choose another place",
    errno.EROFS: "choose another place",
    errno.ENOENT: "make the folder first",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "a file is where a folder is needed; choose another place",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOMEM: "the machine has no memory left",
}

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
"""Errors of file systems that cannot sync folders; then there is nothing to wait for."""


def cause(error: OSError) -> str:
    """The operating system's message for an error, and after `; ` a remedy if one is known."""
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{unread(error)}; {remedy}" if remedy else unread(error)


def unread(error: OSError) -> str:
    """The operating system's message for an error, without a capital: `no space left on device`."""
    text = error.strerror or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """A block in which an OSError becomes an OnnxparError: `cannot write PATH: ` and the cause."""
    try:
        yield
    except OSError as error:
        raise OnnxparError(f"cannot write {os.fspath(path)}: {cause(error)}") from error


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file for writing; its content is on the disk when the block ends. Errors:
    OSError."""
    with path.open("wb") as sink:
        yield sink
        sink.flush()
        os.fsync(sink.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the entries of a folder (new and renamed files) are on the disk. Errors:
    OSError."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def make_folders(folder: Path) -> list[Path]:
    """Creates a folder and its parents where missing. Returns the created folders, the innermost
    first. Errors: OSError."""
    new: list[Path] = []
    for one in (folder, *folder.parents):
        if one.is_dir():
            break
        new.append(one)
    for one in reversed(new):
        try:
            one.mkdir(exist_ok=True)
        except FileExistsError:  # the name is a file, or a broken link
            code = errno.ENOTDIR
            raise NotADirectoryError(code, os.strerror(code), os.fspath(one)) from None
        sync_folder(one.parent)
    return new


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path. The file that the block writes there is synced to the disk and then
    gets the name `path`; if the block fails, nothing is left. A symbolic link stays, and its target
    is replaced. Errors: InputError if the file cannot be written."""
    file = Path(path)
    is_device = file.exists() and not file.is_file()  # such as /dev/stdout; a folder fails later
    try:
        place = Path(os.path.realpath(file))
        with OwnFolder(PREFIX, None if is_device else place.parent) as folder:
            written = folder / "file"
            yield written
            if is_device:
                file.write_bytes(written.read_bytes())
            else:
                put(written, place)
    except OSError as error:
        raise InputError(f"cannot write {file}: {cause(error)}") from error


def put(written: Path, place: Path) -> None:
    """Renames a written file to `place`, after syncing it to the disk. A file that is there already
    is replaced, and its permissions are kept. Errors: OSError."""
    with suppress(FileNotFoundError):
        written.chmod(stat.S_IMODE(place.stat().st_mode))
    _sync(written)
    os.replace(written, place)
    sync_folder(place.parent)


def _sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Yields an open text file, which gets the name `path` when the block succeeds. Errors:
    InputError if the file cannot be written; then nothing is left."""
    with new_file(path) as written, written.open("w", encoding="utf-8") as sink:
        yield sink
