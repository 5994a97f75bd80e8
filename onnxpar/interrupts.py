"""Ends the command `onnxpar` on one line where it is interrupted or terminated while Python still
imports it, or already leaves it. The package imports this first; other programs are left alone."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

STATUSES = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated", 143)}
"""What a command says when a signal ends it, and its exit status."""


def end_now(number: int, frame: FrameType | None) -> None:
    """Ends the process, which has nothing to clean up yet, or no more."""
    word, status = STATUSES[signal.Signals(number)]
    os.write(2, f"onnxpar: {word}\n".encode())
    os._exit(status)


def _is_command() -> bool:
    """Whether this process is `onnxpar ...` or `python -m onnxpar ...`."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    after_m = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
    return name == "onnxpar" or (name == "-m" and after_m[:1] == ["onnxpar"])


def _watch() -> None:
    untouched = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    for number, handler in untouched.items():
        if signal.getsignal(number) == handler:  # nohup ignores them, which stays so
            signal.signal(number, end_now)


if _is_command():
    _watch()
