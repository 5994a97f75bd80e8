"""Redirects a rank's output to files, but still reports failures on the launcher's terminal."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from onnxpar.runtime.log import Log

_terminal: list[tuple[int, int]] = []
"""The rank of this process, and a copy of the descriptor of its original standard error; empty if
standard error is not redirected."""


def redirect_output(log_dir: str | os.PathLike[str], rank: int, stdout: bool = True) -> None:
    """Redirects the output of this process to `rank.N/stdout.log` and `rank.N/stderr.log` in
    `log_dir`; with `stdout=False`, only standard error."""
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
"""Seconds that a failed rank waits so that rank 0 reports first: a launcher ends all ranks after
the first one ends."""


def report_failure(text: str) -> None:
    """Writes an error to the original standard error; does nothing if standard error is not
    redirected. Ranks other than 0 wait first: most failures are the same on all ranks, and the
    launcher ends the waiting ranks after rank 0 has reported."""
    for rank, descriptor in _terminal:
        if rank:
            time.sleep(_HEAD_START)
        _write(descriptor, f"onnxpar: error{f' on rank {rank}' if rank else ''}: {text}")


def report_for_all_ranks(text: str) -> None:
    """Writes a text about all ranks, such as a warning, to the original standard error of rank 0;
    does nothing if that is not redirected."""
    for rank, descriptor in _terminal:
        if not rank:
            _write(descriptor, f"onnxpar: {text}")


def _write(descriptor: int, line: str) -> None:
    with suppress(OSError):
        os.write(descriptor, f"{line}\n".encode(errors="backslashreplace"))
