"""Ends the command `onnxpar` with a one-line message if it is interrupted or terminated while
Python still imports modules, or already exits. The package imports this module first. Other
programs that import onnxpar keep their signal handlers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STATUSES = {
    signal.SIGINT: ("interrupted", 130),
    signal.SIGTERM: ("terminated", 143),
    signal.SIGHUP: ("terminated, because its terminal was closed", 129),
}
"""By signal: the word of the message `onnxpar: interrupted`, and the exit status of the command."""
_waiting: list[int] = []
"""Signals that arrived inside an `uninterrupted` block, and that its end will raise."""
_deferring: list[Deferred] = []
"""The `Deferred` blocks that are open now."""
_shields = [0]
"""Its only element is the number of open `uninterrupted` blocks."""


class Terminated(BaseException):
    """The exception for SIGTERM or SIGHUP (`number`), raised so that `finally` blocks remove
    half-written files. Its arguments, like those of KeyboardInterrupt in this package, are more
    text for the user."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def raise_for(number: int) -> None:
    """Raises KeyboardInterrupt for SIGINT and Terminated for other signals. Inside an
    `uninterrupted` block, the end of that block raises instead."""
    if _shields[0]:
        _waiting.append(number)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        raise Terminated(number)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A block for short steps that must not be left half-done: signals that would end the command
    take effect after the block. In threads other than the main one, which signals never interrupt,
    this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _shields[0] += 1
    try:
        yield
    finally:
        _shields[0] -= 1
        if _waiting and not _shields[0]:
            last = _waiting[-1]
            _waiting.clear()
            raise_for(last)


class Deferred:
    """A `with` block in which SIGTERM does not end the command but sets the event `asked`, so that
    a loop can end at a good point. In threads other than the main one, the block changes nothing.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __enter__(self) -> Deferred:
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
            _deferring.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _deferring:
            _deferring.remove(self)
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked.set()


def is_deferred(number: int) -> bool:
    """True if a `Deferred` block is open and catches this signal, so that the command ends soon,
    not now."""
    return number == signal.SIGTERM and bool(_deferring)


def end_at_next_signal() -> None:
    """Installs handlers, once a signal has asked the command to end soon: the next SIGINT or
    SIGTERM raises an exception, and the one after that kills the process."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, end_now)
        raise_for(number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)


def end_now(number: int, frame: FrameType | None) -> None:
    """A signal handler for times when there is nothing to clean up: prints one line and ends the
    process."""
    word, status = STATUSES[signal.Signals(number)]
    os.write(2, f"onnxpar: {word}\n".encode())
    os._exit(status)


def _is_command() -> bool:
    """True if this process is `onnxpar ...` or `python -m onnxpar ...`."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    after_m = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
    return name == "onnxpar" or (name == "-m" and after_m[:1] == ["onnxpar"])


def _install_handlers() -> None:
    """Installs `end_now` for each signal whose handler is still Python's default."""
    for number in STATUSES:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        if signal.getsignal(number) == handler:  # nohup ignores SIGHUP; keep that
            signal.signal(number, end_now)


if _is_command():
    _install_handlers()
