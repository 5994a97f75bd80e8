"""Reports the failure of a command in one line, with cause and remedy, and ends it cleanly on
signals."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from onnxpar.base.errors import TRACEBACK, OnnxparError, RankError, wants_traceback
from onnxpar.base.interrupts import STATUSES, end_now, is_deferred, raise_for
from onnxpar.base.own_folder import OwnFolder, remove_all, remove_left
from onnxpar.base.write_file import cause
from onnxpar.cli.colours import coloured
from onnxpar.runtime.ranks.redirect import report_failure, report_for_all_ranks


def error_line(error: BaseException) -> str:
    """Returns the line that tells the user about an error; the whole text, maybe several lines, if
    the user asked for tracebacks."""
    text = str(error)
    if isinstance(error, RankError):
        first, _, rest = text.partition("\n")
        hint = f" ({TRACEBACK}=1 shows what the other ranks say)"
        text = first + hint if rest and not wants_traceback() else text
    elif isinstance(error, OnnxparError):
        pass
    elif isinstance(error, OSError):
        named = isinstance(error.filename, (str, bytes, os.PathLike))
        # Failed writes to other files are reported, with their names, by the code that writes.
        where = f"the standard output, or a file in {tempfile.gettempdir()}"
        text = f"{os.fsdecode(error.filename) if named else where}: {cause(error)}"
    elif isinstance(error, MemoryError):
        text = f"not enough memory{': ' if text else ''}{text}; use a larger host"
    else:
        text = f"internal error: {type(error).__name__}: {text}; run again with {TRACEBACK}=1 and "
        text += "report what it prints"
    return text if wants_traceback() else " ".join(text.split())


def report(error: BaseException) -> None:
    """Prints an error as one line on standard error, after its traceback if the user asked for
    tracebacks."""
    if wants_traceback():
        import traceback

        traceback.print_exception(error)
    line = error_line(error)
    print(coloured(f"onnxpar: error: {line}", sys.stderr), file=sys.stderr)
    report_failure(line)


@contextmanager
def quiet_ends() -> Iterator[None]:
    """A block around a whole command. The first signal raises an exception in it (SIGINT:
    KeyboardInterrupt, SIGTERM and SIGHUP: Terminated), later signals are ignored. Failures in other
    threads or in destructors are printed as one line, too. Removes temporary folders: on entry the
    folders of killed processes, on exit the folders of this process."""
    remove_left(Path(tempfile.gettempdir()), OwnFolder.PREFIX)
    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook = lambda args: _report_aside(args.exc_value)
    sys.unraisablehook = lambda args: _report_aside(args.exc_value)
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in STATUSES if is_main}
    ours = [number for number, handler in before.items() if handler in _UNTOUCHED]

    try:
        with _ends_if_stuck(ours) as reacted:

            def end(number: int, frame: FrameType | None) -> None:
                reacted.set()
                for signal_number in ours:  # nothing may interrupt the clean-up
                    signal.signal(signal_number, signal.SIG_IGN)
                raise_for(number)

            for number in ours:
                signal.signal(number, end)
            yield
    finally:
        remove_all()
        threading.excepthook, sys.unraisablehook = hooks
        for number in ours:
            signal.signal(number, before[number])


_UNTOUCHED = (signal.SIG_DFL, signal.default_int_handler, end_now)
"""Signal handlers that `quiet_ends` may replace: Python's defaults and onnxpar's own, but no
handler that a program around onnxpar has installed."""


_PATIENCE = 2.0
"""Seconds after a signal in which Python code must begin to handle it, or the process is ended."""


@contextmanager
def _ends_if_stuck(ours: Collection[int]) -> Iterator[threading.Event]:
    """A block that is left even if Python cannot run signal handlers, because a library computes or
    waits for other ranks: a thread ends the process _PATIENCE seconds after one of the signals
    `ours`, unless a handler has set the yielded event."""
    reacted = threading.Event()
    if not ours:
        yield reacted
        return

    def watch() -> None:
        with receiver:
            while number := receiver.recv(1):
                if is_deferred(number[0]):
                    continue
                if number[0] in ours and not reacted.wait(_PATIENCE):
                    word, status = STATUSES[signal.Signals(number[0])]
                    report_for_all_ranks(word)
                    remove_all()
                    os.write(2, f"onnxpar: {word}\n".encode())
                    os._exit(status)

    sender, receiver = socket.socketpair()
    sender.setblocking(False)
    threading.Thread(target=watch, daemon=True, name="onnxpar-signals").start()
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield reacted
    finally:
        signal.set_wakeup_fd(before)
        sender.close()


def _report_aside(error: BaseException | None) -> None:
    if error is not None and not isinstance(error, SystemExit):
        report(error)
