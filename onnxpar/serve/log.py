"""What a server prints for the people who run it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from onnxpar.errors import wants_traceback


def log_error(error: BaseException) -> None:
    """Prints an error of a request in one line; with the traceback if the user asked for it."""
    inner: Sequence[BaseException] = getattr(
        error, "exceptions", []
    )  # anyio groups errors of tasks
    if len(inner) == 1:
        log_error(inner[0])
        return
    if wants_traceback():
        traceback.print_exception(error)
    text = "; ".join(" ".join(line.split()) for line in str(error).splitlines())
    print(f"onnxpar: error: a request failed: {type(error).__name__}: {text}", file=sys.stderr)
