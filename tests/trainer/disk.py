"""A disk that stops at any file operation."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod")


class Killed(BaseException):
    """What ends a run here: no file changes any more, as after SIGKILL."""


class Disk:
    """Counts the file operations below a folder, of all threads; from a number on, none happens."""

    def __init__(self) -> None:
        self.under = ""
        self.left = -1
        self.told: list[tuple[str, ...]] = []

    def start(self, under: Path, left: int = sys.maxsize) -> None:
        self.under, self.left, self.told = os.fspath(under), left, []

    def stop(self) -> None:
        self.under = ""

    def operation(self, what: str, *names: str) -> None:
        """Told before it happens."""
        if not self.under:
            return
        if self.left <= 0:
            raise Killed
        self.left -= 1
        self.told.append((what, *names))

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """What Python says of each file operation but for those that are patched below."""
        if not self.under or (event != "open" and event not in _CHANGES):
            return
        names = [os.fsdecode(a) for a in args if isinstance(a, str | bytes)]
        if event == "open":
            if not names or not names[0].startswith(self.under) or not args[2] & os.O_ACCMODE:
                return
            names = names[:1]
        elif isinstance(args[-1], int) and args[-1] >= 0:  # a name in a folder that is open
            names = [os.path.join(os.readlink(f"/proc/self/fd/{args[-1]}"), names[0])]
        if any(name.startswith(self.under) for name in names):
            self.operation(event, *names)


DISK = Disk()
