"""Copies parts of files, in the kernel where the file systems allow it."""

from __future__ import annotations

import errno
import os

BLOCK = 8 << 20
"""Bytes that this process copies at a time where the kernel does not."""
_NOT_WITHIN_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of copies that the kernel does not make, such as those between some file systems."""


def copy_part(source: int, sink: int, count: int, start: int, at: int) -> int:
    """Copies at most `count` bytes between two open files, from `start` to `at`; returns how many,
    0 at the end of the source. File systems that can share blocks between files do. Errors:
    OSError."""
    try:
        return os.copy_file_range(source, sink, count, start, at)
    except OSError as error:
        if error.errno not in _NOT_WITHIN_KERNEL:
            raise
    return os.pwrite(sink, os.pread(source, min(count, BLOCK), start), at)
