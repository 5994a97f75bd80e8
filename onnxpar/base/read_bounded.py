"""Reads plan.json, checkpoint.json, tokenizer.json and the like, whose sizes nothing vouches for
before they are read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST = 1 << 28
"""The most bytes of such a file; the largest plans and tokenizers have about a tenth of it."""


def read_bounded(file: Path) -> bytes:
    """Returns the content of a file of at most MOST bytes. Never waits, as opening a pipe would.

    Errors: ValueError if it is larger, or not a file; OSError.
    """
    with open(file, "rb", opener=_open_at_once) as source:
        status = os.fstat(source.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        if status.st_size > MOST:
            raise ValueError(f"it has {status.st_size:,} bytes; such a file has at most {MOST:,}")
        return source.read(MOST)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
