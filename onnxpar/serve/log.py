"""Prints lines for the people who run a server, not for its clients."""

from __future__ import annotations

import sys
import traceback
from collections.abc import MutableMapping, Sequence
from datetime import datetime
from typing import Any

from onnxpar.base.errors import OnnxparError, wants_traceback

_LONGEST_PATH = 200
Scope = MutableMapping[str, Any]
"""An ASGI server's description of a request."""


def log_error(error: BaseException) -> None:
    """Prints the error of a request as one line on standard error; before it the traceback, if the
    user has asked for tracebacks."""
    # anyio groups the errors of tasks
    inner: Sequence[BaseException] = getattr(error, "exceptions", [])
    if len(inner) == 1:
        log_error(inner[0])
        return
    if wants_traceback():
        traceback.print_exception(error)
    text = "; ".join(" ".join(line.split()) for line in str(error).splitlines())
    kind = "" if isinstance(error, OnnxparError) else f"{type(error).__name__}: "
    tell(f"error: a request failed: {kind}{text}")


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """Prints a line about a finished request on standard output, as other servers do."""
    host, port = scope.get("client") or ("-", 0)
    path = scope["raw_path"].decode("latin-1")[:_LONGEST_PATH]  # raw: without control codes
    now = datetime.now().isoformat(" ", "milliseconds")
    line = f'{now} {host}:{port} "{scope["method"]} {path}" {status} {seconds:.3f} s\n'
    sys.stdout.write(line)
    sys.stdout.flush()


def tell(text: str) -> None:
    """Prints a line on standard error with a single write, because several threads may print at
    once."""
    sys.stderr.write(f"onnxpar: {text}\n")
    sys.stderr.flush()
