"""Redirects a rank's output to log files, but still reports failures on the launcher's terminal."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from onnxpar.runtime.launch.launch import Launched
from onnxpar.runtime.ranks.log import Log, write_all

_terminal: list[tuple[Launched, int]] = []
"""(the rank of this process, a copy of the file descriptor of its original standard error); empty
if standard error is not redirected."""


_log: list[tuple[int, Path]] = []
"""(a file descriptor of this rank's stdout.log, the path of the file); empty if no output is
redirected."""


def redirect_output(
    log_dir: str | os.PathLike[str], launched: Launched, stdout: bool = True
) -> None:
    """Redirects the output of this process to `rank.N/stdout.log` and `rank.N/stderr.log` in
    `log_dir`. With `stdout=False`, redirects only standard error; then stdout.log gets only the
    texts of `write_log`."""
    log = Log.open(log_dir, launched.rank)
    assert log.folder is not None
    for descriptor, _ in _log:
        os.close(descriptor)
    _log[:] = [(os.dup(log.stdout.fileno()), log.folder / "stdout.log")]
    for stream, file, number in ((sys.stdout, log.stdout, 1), (sys.stderr, log.stderr, 2)):
        if number == 1 and not stdout:
            continue
        stream.flush()
        if number == 2 and not _terminal:
            _terminal.append((launched, os.dup(number)))
        os.dup2(file.fileno(), number)
    log.close()


def write_log(text: str) -> None:
    """Adds text to this rank's stdout.log, after what it has printed; does nothing if no output is
    redirected. Errors: OnnxparError if the log cannot be written."""
    for descriptor, path in _log:
        sys.stdout.flush()
        write_all(descriptor, text, path)


HEAD_START = 2.0
"""Seconds that a failed rank other than 0 waits before it reports: a launcher ends all ranks after
the first one ends, and rank 0 is to report first."""


def report_failure(text: str) -> None:
    """Writes an error to the original standard error; does nothing if standard error is not
    redirected. Ranks other than 0 wait first: most failures are the same on all ranks, and after
    rank 0 has reported, the launcher ends the ranks that wait."""
    for launched, descriptor in _terminal:
        if launched.rank:
            time.sleep(HEAD_START)
        where = f" on {launched.name}" if launched.rank else ""
        _write(descriptor, f"onnxpar: error{where}: {text}")


def tell_terminal(text: str) -> None:
    """Writes a line to the original standard error, also if standard error is redirected."""
    if not _terminal:
        print(f"onnxpar: {text}", file=sys.stderr, flush=True)
    for _, descriptor in _terminal:
        _write(descriptor, f"onnxpar: {text}")


def report_for_all_ranks(text: str) -> None:
    """Writes a text about all ranks, such as a warning, to the original standard error, on rank 0
    alone; does nothing if standard error is not redirected."""
    for launched, descriptor in _terminal:
        if not launched.rank:
            _write(descriptor, f"onnxpar: {text}")


def _write(descriptor: int, line: str) -> None:
    with suppress(OSError):
        os.write(descriptor, f"{line}\n".encode(errors="backslashreplace"))
