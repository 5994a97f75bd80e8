"""Log files for a rank's standard output and error, and the text that describes an error."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from onnxpar.base.errors import OnnxparError, wants_traceback
from onnxpar.base.write_file import writing

QUOTED_LINES = 15
QUOTED_BYTES = 16384
NODE_FAILED = re.compile(r"running (\w+) node\. Name:'(.*?)' Status Message: (.*)", re.DOTALL)


@dataclass(frozen=True)
class Log:
    """The files for a rank's output: `rank.N/stdout.log` and `stderr.log` in a folder, or temporary
    files without names."""

    stdout: IO[bytes]
    stderr: IO[bytes]
    folder: Path | None

    @staticmethod
    def open(log_dir: str | os.PathLike[str] | None, rank: int) -> Log:
        """Returns new, empty logs of a rank: files in `log_dir` or, if that is None, temporary
        files, which are deleted when the last process closes them."""
        if log_dir is None:
            return Log(tempfile.TemporaryFile(), tempfile.TemporaryFile(), None)
        folder = Path(log_dir) / f"rank.{rank}"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            stdout, stderr = ((folder / f"{name}.log").open("w+b") for name in ("stdout", "stderr"))
        return Log(stdout, stderr, folder)

    @property
    def place(self) -> str:
        """Where the log is, for errors that quote its end: its folder, or for temporary files a
        hint to `log_dir`."""
        return "not kept; see log_dir" if self.folder is None else str(self.folder)

    def tail(self) -> str:
        """Returns the last lines of both files, the standard output's first."""
        lines = [line for file in (self.stdout, self.stderr) for line in _last_lines(file)]
        return "\n".join(lines)

    def write(self, text: str) -> None:
        """Adds text to the standard output's file, unless the files are temporary. Rank and caller
        share the file's position, so neither overwrites the other. Errors: OnnxparError if the file
        cannot be written."""
        if self.folder is not None:
            write_all(self.stdout.fileno(), text, self.folder / "stdout.log")

    def close(self) -> None:
        """Closes both files."""
        self.stdout.close()
        self.stderr.close()


def write_all(descriptor: int, text: str, path: Path) -> None:
    """Writes all of `text` to the file `path`, which is open as `descriptor`. Errors: OnnxparError
    if the file cannot be written."""
    data = memoryview(text.encode(errors="backslashreplace"))
    with writing(path):
        while data:
            data = data[os.write(descriptor, data) :]


def describe(error: Exception) -> str:
    """Returns the text of an error for users: its message, with the type in front unless it is an
    OnnxparError. Of onnxruntime's text about a failed node, only the node's op and name, and the
    message, remain."""
    if isinstance(error, OnnxparError):
        return str(error)
    node = NODE_FAILED.search(str(error))
    if node is None:
        return f"{type(error).__name__}: {error}"
    op, name, message = node.groups()
    return message if message.startswith(op) else f"{op} {name!r}: {message}"


def log(error: Exception) -> None:
    """Writes an error to this process's standard error: as one line, or with a traceback if the
    user asked for tracebacks."""
    if wants_traceback():
        import traceback

        traceback.print_exception(error)
    else:
        print(describe(error).replace("\n", " "), file=sys.stderr)
    sys.stderr.flush()


def _last_lines(file: IO[bytes]) -> list[str]:
    """The last lines of a file that an error quotes."""
    size = os.fstat(file.fileno()).st_size
    start = max(0, size - QUOTED_BYTES)
    text = os.pread(file.fileno(), QUOTED_BYTES, start).decode(errors="replace")
    return text.splitlines()[-QUOTED_LINES:]
