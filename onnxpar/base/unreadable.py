"""Messages for files and folders that cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from onnxpar.base.near_names import nearest
from onnxpar.base.write_file import unread


def cannot_read(path: str | os.PathLike[str], error: OSError, remedy: str = "give a file") -> str:
    """Returns the message for a file that cannot be read: if it is missing, with the name of a
    similar file of its folder."""
    if isinstance(error, FileNotFoundError):
        return missing(path)
    return f"cannot read {os.fspath(path)}: {unread(error)}; {remedy}"


def missing(path: str | os.PathLike[str], kind: str = "file", remedy: str = "") -> str:
    """Returns the message for a file or folder (`kind`) that is missing, with one of a similar
    name, or else the remedy."""
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
