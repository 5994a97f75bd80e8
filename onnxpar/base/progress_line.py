"""A line on a terminal that shows progress, and disappears at the end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from shutil import get_terminal_size

from onnxpar.base.log import LOG


def progress_line(prefix: str) -> Callable[[str], None]:
    """A function that shows a text after the prefix, in place of the previous text; an empty text
    clears the line. Nothing is written if stderr is not a terminal, or if the logger is to be quiet
    or verbose: then it has the text as a message."""

    def show(text: str) -> None:
        if text:
            LOG.debug("%s: %s", prefix, text)
        if sys.stderr.isatty() and LOG.level in (logging.NOTSET, logging.INFO):
            line = f"{prefix}: {text}"[: get_terminal_size().columns - 1] if text else ""
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    return show
