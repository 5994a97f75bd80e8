"""Reads plan.json, checkpoint.json, tokenizer.json and the like with a limit on their size, because
the files may come from anywhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST = 1 << 28
"""Most bytes of such a file, about ten times the largest plans and tokenizers."""


def read_bounded(file: Path) -> bytes:
    """Returns the content of a regular file of at most MOST bytes. Refuses a pipe instead of
    waiting for its writer. Errors: ValueError if the file is larger or not regular; OSError."""
    with open(file, "rb", opener=_open_at_once) as source:
        status = os.fstat(source.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        if status.st_size > MOST:
            raise ValueError(f"it has {status.st_size:,} bytes; such a file has at most {MOST:,}")
        return source.read(MOST)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
