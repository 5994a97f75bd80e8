"""Error messages for files and folders that cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from onnxpar.base.near_names import nearest
from onnxpar.base.write_file import unread


def cannot_read(path: str | os.PathLike[str], error: OSError, remedy: str = "give a file") -> str:
    """Returns the error message for a file that cannot be read. If it does not exist, the message
    suggests a similar name in the same folder; `remedy` ends the message in all other cases."""
    if isinstance(error, FileNotFoundError):
        return missing(path)
    return f"cannot read {os.fspath(path)}: {unread(error)}; {remedy}"


def missing(path: str | os.PathLike[str], kind: str = "file", remedy: str = "") -> str:
    """Returns the error message for a file or folder that does not exist. It suggests a similar
    name in the same folder, else says that the folder is missing, else ends with `remedy`. `kind`
    is the word for it."""
    path = Path(path)
    near = nearest(path.name, _names(path.parent))
    if near is not None:
        remedy = f"did you mean {path.with_name(near)}?"
    elif not path.parent.is_dir():
        remedy = f"there is no folder {path.parent}"
    return f"there is no {kind} {path}" + (f"; {remedy}" if remedy else "")


def _names(folder: Path) -> Iterable[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return ()
