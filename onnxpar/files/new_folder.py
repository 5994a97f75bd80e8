"""Folders that appear at once, in the place of an old one where it may be replaced."""

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
"""Of renameat2(2): paths as they are, and both names swapped."""
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def check_place(path: Path, foreign: Callable[[Path], str | None]) -> Path:
    """Where a folder will stand: `path` without symbolic links. It may be new, empty, or one of
    ours, in which `foreign` names nothing. Errors: InputError where it cannot stand there."""
    place = path.resolve()
    if not place.parent.is_dir():
        raise InputError(f"{path.parent}: no such folder for the output")
    put_back(place)
    if not place.exists():
        return place
    if place == Path.cwd() or place in Path.cwd().parents:
        raise InputError(f"{path}: this command runs in that folder; choose another -o")
    if not place.is_dir():
        raise InputError(f"{path}: exists and is a file; choose another -o")
    odd = foreign(place) if any(place.iterdir()) else None
    if odd is not None:
        raise InputError(f"{path}: exists and {odd}; choose another -o, or remove it first")
    return place


@contextmanager
def new_folder(place: Path, foreign: Callable[[Path], str | None]) -> Iterator[Path]:
    """A folder to write to, which takes the name `place` when the block ends well; one that stands
    there stays whole until then. What processes that were killed have left of others is removed.
    Errors: OSError; InputError where what stands there has become foreign (`check_place`)."""
    put_back(place)
    shutil.rmtree(aside(place), ignore_errors=True)
    with OwnFolder(f".{place.name}.", place.parent) as folder:
        yield folder
        folder.chmod(0o755)
        check_place(place, foreign)
        take_place(folder, place)


def take_place(folder: Path, place: Path) -> None:
    """Gives a folder the name `place`, to stay. What stood there stays whole until then: after it,
    it has the folder's name, or is gone. A kill may leave it at `aside(place)`. Errors: OSError."""
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
    """Swaps two names at once; False where the file system cannot."""
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
    """Where the old folder stands for a moment if names cannot be swapped."""
    return place.with_name(f".{place.name}.old{SUFFIX}")


def put_back(place: Path) -> None:
    """Gives the old folder its name again, if a process was killed before a new one stood there."""
    back = aside(place)
    if back.is_dir() and not place.exists():
        back.rename(place)
