"""Reads .npz files: archives of NumPy arrays."""

from __future__ import annotations

import io
import math
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.base.unreadable import cannot_read


def read_npz(file: Path, names: Collection[str] | None = None) -> dict[str, Array]:
    """Returns the arrays of an .npz file by name: all, or only the arrays in `names`. Errors:
    InputError if the file, or an array, cannot be read."""
    arrays: dict[str, Array] = {}
    with _opened(file) as (archive, reading):
        for name in archive.files:
            if names is None or name in names:
                reading.append(name)
                _shape(archive, name)
                arrays[name] = archive[name]
    return arrays


def npz_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the arrays in an .npz file, by name, without reading the arrays.
    Errors: InputError if the file cannot be read."""
    shapes: dict[str, tuple[int, ...]] = {}
    with _opened(file) as (archive, reading):
        for name in archive.files:
            reading.append(name)
            shapes[name] = _shape(archive, name)
    return shapes


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, list[str]]]:
    """Context with (the archive of an .npz file, a list). The block appends to the list the name of
    each array that it reads, so that an error names the last one. Errors: InputError if the file,
    or an array, cannot be read."""
    reading: list[str] = []
    try:
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise InputError(f"{file} is a single array; write a .npz with one array per input")
        with loaded as archive:
            yield archive, reading
    except OSError as error:
        raise InputError(cannot_read(file, error, "give a .npz file")) from error
    # NumPy's reader of headers also raises these for a damaged file.
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, *PARSING) as error:
        what = f"{file} is not a .npz file{_whole(error)}"
        if reading:
            what = f"array {reading[-1]!r} of {file} cannot be read: {why(error)}"
        raise InputError(f"{what}; write it with numpy.savez") from error


def _shape(archive: Any, name: str) -> tuple[int, ...]:
    """Returns the shape of an array in the archive; () for an entry that is no array, which NumPy
    reads as bytes. Errors: ValueError if its header contradicts its size in the file, which is
    checked before NumPy allocates memory for the array."""
    files: zipfile.ZipFile = archive.zip
    entry = f"{name}.npy" if f"{name}.npy" in files.namelist() else name
    with files.open(entry) as member:
        if member.read(6) != b"\x93NUMPY":
            return ()
    with files.open(entry) as member:
        version = np.lib.format.read_magic(member)
        if version not in ((1, 0), (2, 0), (3, 0)):
            return ()  # NumPy's own reader reports this
        header: Any = member
        if version == (3, 0):  # like the second, except for names of fields
            text = member.read(int.from_bytes(member.read(4), "little")).decode()
            plain = text.encode("ascii", "replace")
            header = io.BytesIO(len(plain).to_bytes(4, "little") + plain)
        first = version == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        try:
            shape, _, dtype = read(header)
        except (MemoryError, RecursionError, OverflowError):  # raised by Python's parser
            raise ValueError("its header does not describe an array") from None
        need, have = math.prod(shape) * dtype.itemsize, files.getinfo(entry).file_size
        is_odd = min(shape, default=0) < 0 or any(size >= 1 << 63 for size in shape)
        if is_odd or (need > have and not dtype.hasobject):
            raise ValueError(f"it has shape {shape} of {dtype}, but {have:,} bytes")
    return tuple(shape)


PARSING = (SyntaxError, TypeError, NotImplementedError, tokenize.TokenError, RuntimeError)
"""Further exceptions that NumPy's reader of headers raises for a damaged header."""


def why(error: Exception) -> str:
    """Returns the reason why NumPy cannot read an array, from NumPy's error."""
    text = str(error).rstrip(".")
    if "allow_pickle" in text or "Python objects" in text:
        return "it holds Python objects; convert it to a dtype of numbers, bools or strings"
    return text or "the file is empty"


def _whole(error: Exception) -> str:
    """Returns ": " and the reason why a file cannot be read at all; empty for NumPy's error about
    pickled objects, which NumPy reports for any unknown file."""
    return "" if "allow_pickle" in str(error) else f": {why(error)}"
