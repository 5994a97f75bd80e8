"""The entry point of the command line: runs a command, and reports a failure in one line."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from io import TextIOWrapper
from typing import Any, NoReturn

from onnxpar.base.errors import OnnxparError
from onnxpar.base.interrupts import STATUSES, Terminated
from onnxpar.base.log import LOG
from onnxpar.base.write_file import cause
from onnxpar.cli.colours import coloured
from onnxpar.cli.command_parser import CommandParser
from onnxpar.cli.error_line import quiet_ends, report
from onnxpar.cli.generate_command import add_generate
from onnxpar.cli.rank_options import apply_to_process
from onnxpar.cli.run_command import add_run
from onnxpar.cli.serve_command import add_serve
from onnxpar.planner.refuse_overwriting import refuse_overwriting
from onnxpar.runtime.ranks.redirect import report_for_all_ranks

QUICK: Mapping[str, Callable[[Any], None]] = {
    "run": add_run,
    "generate": add_generate,
    "serve": add_serve,
}
"""The commands that run a sharded model and so need no compiler. Each value adds the arguments of
its command to a parser, without imports of the compiler, so that these commands start quickly."""


_WRITERS = (
    *("shard", "annotate", "grad", "calibrate", "train"),
    *("checkpoint merge", "checkpoint weights"),
)
"""Commands whose result is a file; with --quiet, they print nothing on standard output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command of these arguments (default: sys.argv); returns its exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed: `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (till the end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names need not be UTF-8
    warnings.formatwarning = _warning_line
    with quiet_ends():
        return _status_of(argv)


def _warning_line(message: Warning | str, *_: object, **__: object) -> str:
    """Returns a Python warning as one line, `onnxpar: warning: ...`, without its place in the
    code."""
    return coloured(f"onnxpar: warning: {message}\n", sys.stderr)


def _status_of(argv: Sequence[str] | None) -> int:
    """Runs a command, reports any failure in one line on standard error, and returns the exit
    status."""
    failure: Exception | None = None
    try:
        with _ends_of_imports():
            args = arguments(sys.argv[1:] if argv is None else argv)
            with _logged(args):
                if "given_model" in args:  # the commands in QUICK have none
                    from onnxpar.graph.model_folder import model_at

                    args.model = model_at(args.given_model)
                refuse_overwriting(vars(args))
                apply_to_process(args)
                status = int(args.command(args))
    except BrokenPipeError:
        status = 0
    except KeyboardInterrupt as end:
        status = _ended(signal.SIGINT, end)
    except Terminated as end:
        status = _ended(signal.Signals(end.number), end)
    except SystemExit as end:  # --help, or arguments that are wrong
        _flush()
        raise end
    except Exception as error:  # the outermost boundary: no traceback reaches a user
        status, failure = 2, error
    failure = _flush() or failure
    if failure is not None:
        with suppress(KeyboardInterrupt, Terminated):  # a launcher ends ranks that wait in it
            report(failure)
        return 2
    return status


class _Lines(logging.Formatter):
    """Formats log messages as lines of the command: `onnxpar: warning: ...`."""

    def format(self, record: logging.LogRecord) -> str:
        kind = "warning: " * (record.levelno >= logging.WARNING)
        return coloured(f"onnxpar: {kind}{super().format(record)}", sys.stderr)


@contextmanager
def _logged(args: argparse.Namespace) -> Iterator[None]:
    """A block in which log messages are lines on standard error, filtered by --quiet and --verbose.
    With --quiet, a command in _WRITERS also prints nothing to standard output, except for JSON."""
    quiet, verbose = getattr(args, "quiet", False), getattr(args, "verbose", False)
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines())
    before = LOG.level
    LOG.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
    LOG.addHandler(handler)
    try:
        with ExitStack() as stack:
            if quiet:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            if quiet and args.words_of_command in _WRITERS and not getattr(args, "json", False):
                stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(before)


@contextmanager
def _ends_of_imports() -> Iterator[None]:
    """A block in which a signal ends the command even while modules are imported: libraries with
    pybind11 turn the exception of a signal into an ImportError, which this block turns back."""
    try:
        yield
    except ImportError as error:
        if isinstance(error.__cause__, (KeyboardInterrupt, Terminated)):
            raise error.__cause__ from None
        raise


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed arguments; `help COMMAND` is `COMMAND --help`. For a correct command in
    QUICK, does not import the modules of other commands."""
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    add = QUICK.get(argv[0]) if argv else None
    if add is not None:
        with suppress(_Wrong):
            quick = _QuickParser(prog="onnxpar")
            add(quick.add_subparsers())
            return quick.parse_args(argv)
    from onnxpar.cli.parser import parser

    return parser().parse_args(argv)


class _Wrong(Exception):
    """Raised by `_QuickParser` for wrong arguments; then the full parser runs and prints its better
    error."""


class _QuickParser(CommandParser):
    """A parser of the commands in QUICK alone; raises `_Wrong` instead of printing errors."""

    def error(self, message: str) -> NoReturn:
        raise _Wrong


def _ended(number: signal.Signals, end: BaseException) -> int:
    """Prints a line about the signal that ended the command, with the arguments of the exception
    `end` (such as the last checkpoint), and reports it to the other ranks; returns the exit status.
    """
    word, status = STATUSES[number]
    print(f"onnxpar: {'; '.join([word, *map(str, end.args)])}", file=sys.stderr)
    report_for_all_ranks(word)
    return status


def _flush() -> Exception | None:
    """Flushes standard output, because nothing would report a failure of Python's own flush at
    exit. Returns the error; None if there is none, or if the reader has closed the pipe."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        _drop_output()
        return OnnxparError(f"cannot write to the standard output: {cause(error)}")
    return None


def _drop_output() -> None:
    """Redirects standard output to /dev/null, so that the interpreter's last flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
