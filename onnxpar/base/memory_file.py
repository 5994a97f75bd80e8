"""Files in memory that several processes can map."""

from __future__ import annotations

import os
import tempfile


def make_file(name: str) -> int:
    """Returns the descriptor of a new, empty file in memory, which child processes do not
    inherit."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())
