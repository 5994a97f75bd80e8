"""One line on a terminal that says what is being done, and goes when it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from shutil import get_terminal_size


def progress_line(prefix: str) -> Callable[[str], None]:
    """What shows a text after the prefix, in place of the one before; an empty text clears the
    line. Nothing is written where stderr is no terminal."""

    def show(text: str) -> None:
        if sys.stderr.isatty():
            line = f"{prefix}: {text}"[: get_terminal_size().columns - 1] if text else ""
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    return show
