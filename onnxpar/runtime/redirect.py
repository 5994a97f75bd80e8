"""Redirects a rank's output to files, and still reports failures on the launcher's terminal."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from onnxpar.runtime.log import Log

_terminal: list[tuple[int, int]] = []
"""The rank of this process, and a copy of its standard error, if that is redirected."""


def redirect_output(log_dir: str | os.PathLike[str], rank: int, stdout: bool = True) -> None:
    """Sends what this process writes to `rank.N/stdout.log` and `stderr.log` from now on; to the
    latter alone without `stdout`."""
    log = Log.open(log_dir, rank)
    for stream, file, number in ((sys.stdout, log.stdout, 1), (sys.stderr, log.stderr, 2)):
        if number == 1 and not stdout:
            continue
        stream.flush()
        if number == 2 and not _terminal:
            _terminal.append((rank, os.dup(number)))
        os.dup2(file.fileno(), number)
    log.close()


_HEAD_START = 2.0
"""Seconds that a rank that fails leaves rank 0 to say why: launchers end all once one has ended."""


def report_failure(text: str) -> None:
    """Writes why a command failed to what was standard error before it was redirected, if it was.
    Other ranks than 0 leave that one the time to do so first: most failures are those of all, and
    launchers end the other ranks then."""
    for rank, descriptor in _terminal:
        if rank:
            time.sleep(_HEAD_START)
        _write(descriptor, f"onnxpar: error{f' on rank {rank}' if rank else ''}: {text}")


def report_for_all_ranks(text: str) -> None:
    """Writes there, on rank 0, what holds for all ranks: a warning, or what a signal did."""
    for rank, descriptor in _terminal:
        if not rank:
            _write(descriptor, f"onnxpar: {text}")


def _write(descriptor: int, line: str) -> None:
    with suppress(OSError):
        os.write(descriptor, f"{line}\n".encode(errors="backslashreplace"))
