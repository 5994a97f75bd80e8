"""Files that appear at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from onnxpar.errors import InputError


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A text file to write to, which takes its place when all of it is there. Errors: InputError
    where it cannot be written; then nothing is left."""
    file = Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".onnxpar-", dir=file.parent) as folder:
            written = Path(folder) / "file"
            with written.open("w", encoding="utf-8") as sink:
                yield sink
            os.replace(written, file)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from None
