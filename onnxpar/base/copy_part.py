"""Copies parts of files, inside the kernel (copy_file_range) where the file systems allow it."""

from __future__ import annotations

import errno
import os

BLOCK = 8 << 20
"""Most bytes per call of `copy_part` where the kernel cannot copy, and this process reads and
writes."""
_NOT_WITHIN_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of copies that the kernel does not make, such as those between some file systems."""


def copy_part(source: int, sink: int, count: int, start: int, at: int) -> int:
    """Copies at most `count` bytes from offset `start` of the open file `source` to offset `at` of
    the open file `sink`. Returns the number of bytes copied; 0 at the end of the source. File
    systems that can share blocks between files do so. Errors: OSError."""
    try:
        return os.copy_file_range(source, sink, count, start, at)
    except OSError as error:
        if error.errno not in _NOT_WITHIN_KERNEL:
            raise
    return os.pwrite(sink, os.pread(source, min(count, BLOCK), start), at)
