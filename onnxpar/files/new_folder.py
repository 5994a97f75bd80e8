"""Folders that appear complete, also in place of an old one that may be replaced."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxpar.errors import InputError
from onnxpar.files.own_folder import SUFFIX, OwnFolder
from onnxpar.files.write_file import sync_folder

_AT_FDCWD, _EXCHANGE = -100, 2
"""Constants of renameat2(2): paths relative to the working folder, and swap both names."""
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def check_place(path: Path, foreign: Callable[[Path], str | None]) -> Path:
    """The place of a new folder: `path` without symbolic links. It may be free, an empty folder, or
    one of onnxpar's, in which `foreign` finds nothing that is not. Errors: InputError if a folder
    cannot be put there."""
    place = path.resolve()
    if not place.parent.is_dir():
        raise InputError(f"{path.parent}: no such folder for the output")
    put_back(place)
    if not place.exists():
        return place
    if place == Path.cwd() or place in Path.cwd().parents:
        raise InputError(f"{path}: the command runs in that folder; choose another -o")
    if not place.is_dir():
        raise InputError(f"{path} exists and is a file; choose another -o")
    odd = foreign(place) if any(place.iterdir()) else None
    if odd is not None:
        raise InputError(f"{path} exists and {odd}; choose another -o, or remove it first")
    return place


@contextmanager
def new_folder(place: Path, foreign: Callable[[Path], str | None]) -> Iterator[Path]:
    """A folder to write to, which gets the name `place` when the block succeeds; an old folder
    there stays complete until then. Removes the remains of processes that were killed.

    Errors: OSError; InputError if the old folder has become foreign (`check_place`).
    """
    put_back(place)
    shutil.rmtree(aside(place), ignore_errors=True)
    with OwnFolder(f".{place.name}.", place.parent) as folder:
        yield folder
        folder.chmod(0o755)
        check_place(place, foreign)
        take_place(folder, place)


def take_place(folder: Path, place: Path) -> None:
    """Gives a folder the name `place` for good. An old folder there stays complete until then;
    afterwards it has the new folder's former name, or is gone. If the process is killed, the old
    folder may be left at `aside(place)`. Errors: OSError."""
    back = aside(place)
    was_swapped = False
    if not os.path.lexists(place):
        folder.rename(place)
    elif not (was_swapped := _exchange(folder, place)):
        place.rename(back)
        try:
            folder.rename(place)
        except OSError:
            back.rename(place)
            raise
    sync_folder(place.parent)
    if not was_swapped:
        shutil.rmtree(back, ignore_errors=True)


def _exchange(one: Path, two: Path) -> bool:
    """Swaps two names atomically; False if the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(two)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), os.fspath(two))


def aside(place: Path) -> Path:
    """The temporary place of the old folder if names cannot be swapped."""
    return place.with_name(f".{place.name}.old{SUFFIX}")


def put_back(place: Path) -> None:
    """Gives the old folder its name back, if a process was killed before the new one was there."""
    back = aside(place)
    if back.is_dir() and not place.exists():
        back.rename(place)
