"""A line on a terminal that shows progress, and disappears at the end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from shutil import get_terminal_size

from onnxpar.base.log import LOG


def progress_line(prefix: str) -> Callable[[str], None]:
    """Returns a function that shows `prefix: text` on one line of stderr, in place of its previous
    text; an empty text clears the line. It writes only on a terminal, and only at the logger's
    default levels. Each text is also a debug message of the logger."""

    def show(text: str) -> None:
        if text:
            LOG.debug("%s: %s", prefix, text)
        if sys.stderr.isatty() and LOG.level in (logging.NOTSET, logging.INFO):
            line = f"{prefix}: {text}"[: get_terminal_size().columns - 1] if text else ""
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    return show
