"""What a server prints for the people who run it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from onnxpar.errors import OnnxparError, wants_traceback


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
    kind = "" if isinstance(error, OnnxparError) else f"{type(error).__name__}: "
    tell(f"error: a request failed: {kind}{text}")


def tell(text: str) -> None:
    """Prints a line, in one piece: several threads may print at once."""
    sys.stderr.write(f"onnxpar: {text}\n")
    sys.stderr.flush()
