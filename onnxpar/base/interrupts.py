"""Ends the command `onnxpar` on one line where it is interrupted or terminated while Python still
imports it, or already leaves it. The package imports this first; other programs are left alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUSES = {
    signal.SIGINT: ("interrupted", 130),
    signal.SIGTERM: ("terminated", 143),
    signal.SIGHUP: ("terminated, as its terminal is gone", 129),
}
"""What a command says when a signal ends it, and its exit status."""
_waiting: list[int] = []
"""Signals that came while nothing was to be interrupted."""
_shields = [0]


class Terminated(BaseException):
    """The process was asked to end by a signal; raised so that what is half-written is removed
    first."""

    def __init__(self, number: int) -> None:
        self.number = number


def raise_for(number: int) -> None:
    """Raises what ends a command upon a signal: at once, or at the end of `uninterrupted`."""
    if _shields[0]:
        _waiting.append(number)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        raise Terminated(number)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within it, a signal that ends the command waits: for what must not be left half-made and
    does not take long. Other threads than the main one are never interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _shields[0] += 1
    try:
        yield
    finally:
        _shields[0] -= 1
        if _waiting and not _shields[0]:
            raise_for(_waiting.pop())


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
    for number in STATUSES:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        if signal.getsignal(number) == handler:  # nohup ignores them, which stays so
            signal.signal(number, end_now)


if _is_command():
    _watch()
