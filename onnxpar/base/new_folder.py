"""Creates folders that get their names only once they are complete, also in place of an older
folder."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxpar.base.errors import InputError
from onnxpar.base.own_folder import SUFFIX, OwnFolder
from onnxpar.base.write_file import sync_folder

_AT_FDCWD, _EXCHANGE = -100, 2
"""Constants of renameat2(2): paths relative to the working folder, and swap both names."""
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def check_place(path: Path, foreign: Callable[[Path], str | None]) -> Path:
    """Checks that a new folder can be put at `path`; returns `path` without symbolic links.
    Nothing, an empty folder, or an older folder that may be replaced can be there.

    foreign  returns why onnxpar must not replace the folder there ("is not a sharded model"), or
             None if it may

    Errors: InputError.
    """
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
def new_folder(
    place: Path,
    foreign: Callable[[Path], str | None],
    joins: Callable[[Path, Path], bool] | None = None,
) -> Iterator[Path]:
    """Yields an empty temporary folder, which gets the name `place` when the block succeeds; an
    older folder at `place` stays complete until then, and is replaced. Also removes temporary
    folders of processes that were killed.

    foreign  as for `check_place`
    joins    if `joins(new, old)` is true, the files of the new folder move into the old one instead
             of replacing it; several processes may do that at once

    Errors: OSError; InputError if the folder at `place` must not be replaced.
    """
    put_back(place)
    shutil.rmtree(aside(place), ignore_errors=True)
    with OwnFolder(f".{place.name}.", place.parent) as folder:
        yield folder
        folder.chmod(0o755)
        check_place(place, foreign)
        if joins is None or not _has_joined(folder, place, joins):
            take_place(folder, place)


def _has_joined(folder: Path, place: Path, joins: Callable[[Path, Path], bool]) -> bool:
    """Gives the new folder the name `place` if that is free, else moves its files into the folder
    there if `joins(new, old)` is true. Returns False if it did neither. Errors: OSError."""
    if not os.path.lexists(place):
        try:
            folder.rename(place)
        except OSError as error:
            if error.errno not in _TAKEN:  # another process may just have taken the name
                raise
        else:
            sync_folder(place.parent)
            return True
    if not joins(folder, place):
        return False
    for path in sorted(folder.rglob("*")):
        target = place / path.relative_to(folder)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            os.replace(path, target)
    sync_folder(place)
    return True


def take_place(folder: Path, place: Path) -> None:
    """Gives a complete folder the name `place`. An older folder at `place` stays complete until
    then; afterwards it has the former name of the new folder, or is removed. If the process is
    killed meanwhile, the older folder may be left at `aside(place)`, from where `put_back` restores
    it. Errors: OSError."""
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
    """Swaps the names of two folders atomically. Returns False if the file system cannot."""
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
    """Returns the path that the older folder has between two renames, where the file system cannot
    swap two names."""
    return place.with_name(f".{place.name}.old{SUFFIX}")


def put_back(place: Path) -> None:
    """Moves an older folder from `aside(place)` back to `place`, if a process was killed after it
    had moved the older folder away and before the new one got the name."""
    back = aside(place)
    if back.is_dir() and not place.exists():
        back.rename(place)
